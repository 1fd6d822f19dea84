"""Published steps of Megatron-LM as rows to fit and to judge: the columns of ``data/megatron_tables.csv``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hora.plan.collectives import DATA
from hora.plan.memory import Layout, Transformer
from hora.plan.published import Row, Unread, machine_of, number, rows_of
from hora.plan.transformer import SOFTWARE, Kernels, Published, fit, flops, step

__all__ = ["Step", "fit_kernels", "rows"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One published row."""

    source: str
    published: Published
    gpus: int
    flops: float

    @property
    def nodes(self) -> int:
        """Servers."""
        return self.published.machine.nodes(self.gpus)

    def seconds(self, kernels: Kernels) -> float:
        """Predicted seconds of one step."""
        row = self.published
        return step(row.model, row.layout, row.machine, kernels, row.software).total


def rows(table: Sequence[Row], name: str = "megatron_tables.csv") -> list[Step | Unread]:
    """All rows that tell a step's time; weak-scaling rows become times next to their baseline's."""
    found: list[Step | Unread] = []
    baseline: Step | None = None
    for row in table:
        read = _row(row, f"{name}:{row.get('id', '')}", baseline)
        if isinstance(read, Step) and number(row.get("weak_scaling_pct", "")) == 100:
            baseline = read
        if isinstance(read, Unread) and "params+optimizer" in row.get("notes", ""):
            continue  # a row about memory
        found.append(read)
    return found


def _software(row: Row) -> str:
    text = f"{row.get('id', '')} {row.get('source_table', '')} {row.get('source', '')}".lower()
    if "mcore" in text or "megatron-core" in text:
        return "megatron-core"
    if "2019" in text or "meg19" in text:
        return "megatron-2019"
    return "megatron-2020" if "2020" in text or "meg20" in text else "megatron-2021"


def _row(row: Row, source: str, baseline: Step | None) -> Step | Unread:
    def whole(name: str, default: int = 1) -> int:
        value = number(row.get(name, ""))
        return int(value) if value else default

    if not whole("layers", 0) or not whole("hidden", 0) or not whole("global_batch", 0):
        return Unread(source=source, reason="the model's shape or batch is not published")
    machine = machine_of(row.get("hardware", ""))
    if machine is None:
        return Unread(source=source, reason=f"no preset resembles {row.get('hardware')}")
    name = _software(row)
    software = SOFTWARE[name]
    model = Transformer(
        layers=whole("layers"),
        hidden=whole("hidden"),
        heads=whole("heads"),
        sequence=whole("seq", 2048),
        vocabulary=whole("vocab", 51_200),
        feed_forward=whole("ffn", 0),
    )
    gpus, tensor, pipeline = whole("gpus"), whole("tp"), whole("pp")
    data = whole("dp", max(1, gpus // (tensor * pipeline)))
    per_worker = max(1, whole("global_batch") // data)
    micro = whole("micro_batch", 0) or min(
        4 if pipeline * tensor == 1 else 2 if pipeline == 1 else 1, per_worker
    )
    text = row.get("recompute", "").lower()
    recompute: Literal["none", "selective", "full"] = (
        "full" if text.startswith("full") else "selective" if text.startswith("sel") else "none"
    )
    layout = Layout(
        micro_batch=micro,
        micro_batches=max(1, per_worker // micro),
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        # Megatron-Core interleaves by default recipes; four chunks where a row does not tell
        interleaved=whole("vp_chunks", 4 if software.flash and pipeline > 1 else 1),
        sequence_parallel=row.get("seq_parallel", "") == "yes" or software.flash,
        recompute=recompute,
    )
    work = flops(model, whole("global_batch"), recomputed=recompute == "full")
    seconds = number(row.get("iter_time_s", "")) or number(row.get("iter_time_s_derived", ""))
    rate = number(row.get("tflops_per_gpu", ""))
    share = number(row.get("weak_scaling_pct", ""))
    if not seconds and rate:
        seconds = work / (rate * 1e12 * gpus)
    if not seconds and share and baseline is not None:
        per_gpu = baseline.flops / baseline.gpus / baseline.published.seconds * share / 100
        seconds = work / (per_gpu * gpus)
    if not seconds or not math.isfinite(seconds):
        return Unread(source=source, reason="no time of a step is published")
    published = Published(model=model, layout=layout, machine=machine, software=software, seconds=seconds)
    return Step(source=source, published=published, gpus=gpus, flops=work)


def fit_kernels() -> Kernels:
    """The constants of matrix products, from rows of one server; ``early`` from the single GPU of 2019."""
    single = [
        row for row in rows(rows_of(DATA / "megatron_tables.csv")) if isinstance(row, Step) and row.nodes == 1
    ]
    kernels = fit([row.published for row in single if not row.published.software.early])
    early = [row for row in single if row.published.software.early and row.gpus == 1]
    factors = [row.published.seconds / row.seconds(kernels) for row in early]
    return replace(kernels, early=math.exp(sum(map(math.log, factors)) / len(factors)))

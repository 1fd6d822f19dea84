"""Published measurements: the tables in ``data/`` and any file with their columns, as one kind of row.

Tables tell themselves apart by their columns. A row that cannot be read (an unknown machine, a missing
number) is kept as ``Unread`` with its reason: nothing is left out silently.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hora.core.errors import DataError
from hora.plan.collectives import DATA
from hora.plan.hardware import GPUS, MACHINES, Machine, Precision
from hora.plan.models import WORKLOADS
from hora.plan.step import Work

__all__ = [
    "SUBWORDS",
    "Measured",
    "Unread",
    "machine_of",
    "mlperf_model",
    "number",
    "read",
    "rows_of",
    "throughput_rows",
]

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published step of a data-parallel training.

    Attributes:
        group: what shares constants: software, model, task, sequence.
        software: release of the container; constants drift with it.
        rate: published samples per second over all GPUs, in the group's unit.
    """

    source: str
    group: tuple[str, str, str, str]
    software: str
    machine: Machine
    work: Work
    rate: float

    @property
    def nodes(self) -> int:
        """Servers."""
        return self.machine.nodes(self.work.gpus)

    @property
    def seconds(self) -> float:
        """Published seconds per micro-batch."""
        return self.work.batch * self.work.gpus / self.rate

    @property
    def model(self) -> str:
        """The preset's name."""
        return self.group[1]


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A row that was not recomputed, and why."""

    source: str
    reason: str


def rows_of(path: Path) -> list[Row]:
    """The rows of a table.

    Raises:
        DataError: the file cannot be read or holds no rows.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [
                {str(key).strip(): (value or "").strip() for key, value in row.items() if key is not None}
                for row in csv.DictReader(file)
            ]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}.", fix="Give the path of a table (.csv)."
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} is not a table in UTF-8: {error}.", fix="Give a .csv file with a line of column names."
        ) from error
    if not rows:
        raise DataError(f"{path} holds no rows.", fix="Give a .csv file with a line of column names.")
    return rows


def read(names: Sequence[str] = ()) -> Iterator[tuple[str, list[Row]]]:
    """Tables by name: those that come with Hora, or the given files."""
    for path in [Path(name) for name in names] or sorted(DATA.glob("*.csv")):
        yield path.name, rows_of(path)


def number(text: str) -> float | None:
    """A number in a cell; ``None`` where there is none."""
    found = re.search(
        r"-?\d+(\.\d+)?([eE][-+]?\d+)?", text.replace(",", "") if text.count(",") == 1 else text
    )
    return float(found.group()) if found else None


_MACHINES = (  # first match counts; the GPU's memory decides between variants
    (r"dgx.?-?2h|sxm3.*-h\b", "dgx-2h"),
    (r"dgx.?-?2\b", "dgx-2"),
    (r"b200", "dgx-b200"),
    (r"h200", "dgx-h200"),
    (r"h100|eos", "dgx-h100"),
    (r"a100|selene", "dgx-a100"),
    (r"dgx.?-?1|v100", "dgx-1"),
)


def machine_of(system: str, gpu: str = "") -> Machine | None:
    """The machine that a table means; ``None`` for one that no preset resembles."""
    text = f"{system} {gpu}".lower()
    for pattern, name in _MACHINES:
        if re.search(pattern, system.lower()) or re.search(pattern, text):
            memory = re.search(r"(\d+) ?gb", text)
            variant = f"{name}-{memory.group(1)}gb" if memory else name
            return MACHINES.get(variant, MACHINES[name])
    return None


PRECISIONS: dict[str, Precision] = {
    "mixed": "mixed",
    "fp16": "mixed",
    "bf16": "mixed",
    "amp": "mixed",
    "tf32": "tf32",
    "fp32": "fp32",
}
_MODELS = (
    (r"resnet.?-?50", "resnet50"),
    (r"bert", "bert-large"),
    (r"mask.?r-?cnn", "maskrcnn"),
    (r"ssd", "ssd300"),
    (r"gnmt", "gnmt"),
    (r"transformer.?-?xl.*base", "transformer-xl-base"),
    (r"transformer.?-?xl", "transformer-xl-large"),
    (r"transformer", "transformer-big"),
)
BERT_GLOBAL = {"128": 65_536, "512": 32_768}
"""Sequences per step of the published BERT recipe (LAMB, phases 1 and 2), where a row does not tell."""


def model_of(text: str) -> str:
    """The preset's name, or the text itself in small letters for a model that has none."""
    for pattern, name in _MODELS:
        if re.search(pattern, text.lower()):
            return name
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def throughput_rows(rows: Sequence[Row], name: str = "dle_throughput.csv") -> list[Measured | Unread]:
    """Rows of a throughput table; repeated publications of one measurement become one, their mean."""
    found: list[Measured | Unread] = []
    for index, row in enumerate(rows):
        source = f"{name}:{index + 2}"
        read = _throughput(row, source) if "throughput" in row else _mlperf(row, source)
        found.append(read)
    return _merged(found)


def _merged(rows: Sequence[Measured | Unread]) -> list[Measured | Unread]:
    same: dict[object, list[Measured]] = {}
    out: list[Measured | Unread] = []
    for row in rows:
        if isinstance(row, Unread):
            out.append(row)
            continue
        same.setdefault((row.group, row.software, row.machine.name, row.work), []).append(row)
    out.extend(replace(group[0], rate=sum(one.rate for one in group) / len(group)) for group in same.values())
    return out


def _throughput(row: Row, source: str) -> Measured | Unread:
    machine = machine_of(row.get("system", ""), row.get("gpu", ""))
    precision = PRECISIONS.get(row.get("precision", "mixed").lower())
    gpus, rate = number(row.get("gpus", "")), number(row["throughput"])
    if machine is None:
        return Unread(source=source, reason=f"no preset resembles {row.get('system')} {row.get('gpu')}")
    if precision is None or not gpus or not rate:
        return Unread(source=source, reason="precision, GPUs or throughput cannot be read")
    model, task, sequence = (
        model_of(f"{row['model']} {row['task']}"),
        row.get("task", ""),
        row.get("seq_len", ""),
    )
    preset = WORKLOADS.get(model)
    batch = number(row.get("micro_batch", "")) or number(row.get("batch_per_gpu", ""))
    if batch is None:
        usual = preset.batch if preset else 64
        batch = usual if precision == "mixed" else usual / 2
    elif preset and preset.unit == "tokens" and batch < 1024:
        # sentences, or sequences of the length that the model is trained with
        batch *= preset.batch / {"gnmt": 128, "transformer-xl-base": 32, "transformer-xl-large": 8}.get(
            model, 128
        )
    micro_batches = number(row.get("accum", ""))
    if micro_batches is None:
        whole = BERT_GLOBAL.get(sequence) if model == "bert-large" and task == "pretrain" else None
        micro_batches = max(1.0, round(whole / (batch * gpus))) if whole else 1.0
    bytes_each = 2 if precision == "mixed" else 4
    work = Work(
        gpus=int(gpus),
        batch=batch,
        micro_batches=micro_batches,
        precision=precision,
        gradients=bytes_each * (preset.parameters if preset else 100e6),
        serial=bool(preset and preset.sequential),
    )
    return Measured(
        source=source,
        group=(row.get("framework", ""), model, task, sequence),
        software=row.get("container", ""),
        machine=machine,
        work=work,
        rate=rate,
    )


MLPERF = "MLPerf v0.6"
SUBWORDS = 50
"""Subword units of a pair of sentences, both sides, in GNMT's training set."""


def mlperf_model(benchmark: str) -> str:
    """The preset of an MLPerf benchmark, or its own name where there is none."""
    return {"resnet": "resnet50", "ssd": "ssd300", "transformer": "transformer-big"}.get(benchmark, benchmark)


def _mlperf(row: Row, source: str) -> Measured | Unread:
    machine = machine_of(row["system"], row["accelerator"])
    step = number(row["ms_per_step"])
    batch, gpus = number(row["batch_per_accelerator"]), number(row["accelerators"])
    model = mlperf_model(row["benchmark"])
    if machine is None:
        return Unread(source=source, reason=f"no preset resembles {row['system']} {row['accelerator']}")
    whole = number(row["global_batch"])
    if not step and (rate := number(row.get("samples_per_sec", ""))) and whole:
        step = 1e3 * whole / rate
    if not batch and whole and gpus:
        batch = whole / gpus
    if model not in WORKLOADS:
        return Unread(source=source, reason=f"{row['benchmark']}: Hora has no preset of this model")
    if not step or not batch or not gpus:
        return Unread(source=source, reason=f"{row['benchmark']}: no time per step is published")
    preset = WORKLOADS[model]
    if model == "gnmt":
        batch *= SUBWORDS
    work = Work(
        gpus=int(gpus),
        batch=batch,
        micro_batches=1,
        precision="mixed",
        gradients=2 * preset.parameters,
        serial=preset.sequential,
    )
    rate = batch * gpus / (step / 1e3)
    return Measured(
        source=source, group=(MLPERF, model, "", ""), software="v0.6", machine=machine, work=work, rate=rate
    )


def gpu_memory(name: str) -> float:
    """Bytes of a GPU by its name."""
    return GPUS[name].memory

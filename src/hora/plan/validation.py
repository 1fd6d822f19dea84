"""Predicted against published, row by row, with two trivial baselines beside.

Single-node rows are scored by a prediction that has not seen them (left out of the correction); rows of
several servers take no part in any fit. A file of the user's may hold models that Hora has no constants
for: they are fitted to that file's own single-node rows, and its other rows judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from hora.plan import calibration, convergence, megatron, memory
from hora.plan.calibration import Calibrated
from hora.plan.collectives import DATA, all_reduce, bus_bandwidth, gather
from hora.plan.hardware import MACHINES
from hora.plan.memory import Layout, Transformer
from hora.plan.models import GPTS, WORKLOADS
from hora.plan.prediction import CLOSED_FORM, OTHER_GENERATION, PER_DOUBLING, half_width, predict, work_of
from hora.plan.published import (
    BERT_GLOBAL,
    MLPERF,
    SUBWORDS,
    Measured,
    Row,
    Unread,
    machine_of,
    mlperf_model,
    number,
    read,
    rows_of,
    throughput_rows,
)
from hora.plan.question import Prediction, Question
from hora.plan.scores import Score
from hora.plan.search import best_batch
from hora.plan.step import Work
from hora.plan.transformer import THROTTLED

__all__ = ["validate"]


def validate(names: Sequence[str] = ()) -> tuple[list[Score], list[Unread]]:
    """Scores of every row that can be recomputed, and the others with their reasons.

    Args:
        names: paths of tables; none for those that come with Hora.

    Raises:
        DataError: a file cannot be read.
    """
    scores: list[Score] = []
    unread: list[Unread] = []
    for name, rows in read(names):
        for found in _table(name, rows):
            if isinstance(found, Unread):
                unread.append(found)
            else:
                scores.append(found)
    return scores, unread


def _table(name: str, rows: Sequence[Row]) -> Iterator[Score | Unread]:
    columns = rows[0].keys()
    if "throughput" in columns:
        yield from _rates(throughput_rows(rows, name))
    elif "score_minutes" in columns:
        yield from _rates(throughput_rows(rows, name))
        yield from _minutes(rows, name)
    elif "tflops_per_gpu" in columns:
        yield from _megatron(rows, name)
        yield from _memory(rows, name)
    elif "epochs_mean" in columns:
        yield from _epochs(rows, name)
    elif "busbw_GBps_oop" in columns:
        yield from _collectives(rows, name)
    elif "time_hours" in columns:
        yield from _hours(rows, name)
    elif "Size" in columns:
        yield from _sizes(rows, name)
    else:
        yield Unread(
            source=name, reason=f"no table of Hora has the columns {', '.join(list(columns)[:6])}, ..."
        )


def _rates(rows: Sequence[Measured | Unread]) -> Iterator[Score | Unread]:
    """Samples per second of data-parallel training."""
    known = _own(rows)
    for row in rows:
        if isinstance(row, Unread):
            yield row
            continue
        found = known.get(row.group)
        if found is None:
            yield Unread(source=row.source, reason=f"no single-node measurement of {'/'.join(row.group)}")
            continue
        parts, nearness = found.parts(row.work, row.machine, row.software, without=row.source)
        others = [other for other in found.rows if other.source != row.source]
        if not others:
            yield Unread(
                source=row.source, reason="the only single-node row of its model: nothing predicts it"
            )
            continue
        half = half_width(nearness, row.nodes)
        if all(other.machine.gpu.generation != row.machine.gpu.generation for other in others):
            half += OTHER_GENERATION
        place = "one server" if row.nodes == 1 else "several servers"
        shares = [
            other.rate / other.work.gpus / other.machine.gpu.peak(other.work.precision) for other in others
        ]
        nearest = max(
            others, key=lambda other: calibration.nearness(other, row.work, row.machine, row.software)
        )
        yield Score(
            family=f"{'MLPerf v0.6 steps' if row.group[0] == MLPERF else 'throughput'}, {place}",
            source=row.source,
            what=f"{row.group[0]} {row.model} {row.machine.name} x{row.work.gpus} {row.work.precision}",
            unit="samples/s",
            predicted=row.work.batch * row.work.micro_batches * row.work.gpus / parts.total,
            published=row.rate,
            half=half,
            single=row.nodes == 1,
            gpus=row.work.gpus,
            constant=sum(shares) / len(shares) * row.machine.gpu.peak(row.work.precision) * row.work.gpus,
            linear=nearest.rate / nearest.work.gpus * row.work.gpus,
            group="/".join(row.group),
        )


def _own(rows: Sequence[Measured | Unread]) -> dict[calibration.Group, Calibrated]:
    """Frozen constants; for groups that have none, constants of these rows' single-node part."""
    known = dict(calibration.calibrated())
    fresh: dict[calibration.Group, list[Measured]] = {}
    for row in calibration.single_node(rows):
        if row.group not in known:
            fresh.setdefault(row.group, []).append(row)
    for group, measured in fresh.items():
        known[group] = Calibrated(calibration.fit(measured), tuple(measured))
    return known


def _minutes(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Minutes until the target: with the published epochs, else with those of the model's curve."""
    for index, row in enumerate(rows):
        source = f"{name}:{index + 2} minutes"
        found = _training(row, f"{name}:{index + 2}")
        if isinstance(found, str):
            yield Unread(source=source, reason=f"{row['benchmark']}: {found}")
            continue
        answer, half, minutes = found
        asked = answer.question
        nodes = asked.machine.nodes(asked.gpus)
        assert answer.training is not None
        assert answer.epochs is not None
        yield Score(
            family=f"MLPerf minutes, {'one server' if nodes == 1 else 'several servers'}",
            source=source,
            what=f"{asked.name} {asked.machine.name} x{asked.gpus}, {answer.epochs.value:.3g} epochs",
            unit="min",
            predicted=answer.training.value / 60,
            published=minutes,
            half=half,
            single=nodes == 1,
            gpus=asked.gpus,
        )


def _training(row: Row, source: str) -> tuple[Prediction, float, float] | str:
    """The prediction of a training, half of its interval and the published minutes; or why there is none.

    A row of one server is judged by the others: its own has no say in the correction.
    """
    machine = machine_of(row["system"], row["accelerator"])
    model = mlperf_model(row["benchmark"])
    gpus, minutes = number(row["accelerators"]), number(row["score_minutes"])
    if machine is None or model not in WORKLOADS or not gpus or not minutes:
        return "no preset of its model or machine, or no time is published"
    preset = WORKLOADS[model]
    batch = (number(row["global_batch"]) or 0.0) * (SUBWORDS if model == "gnmt" else 1)
    asked = Question(
        name=model,
        model=preset,
        machine=machine,
        gpus=int(gpus),
        batch=round(batch / gpus) * int(gpus),
        epochs=number(row["converge_epoch_median"]) or 0.0,
        samples=(number(row["steps_per_epoch"]) or 0.0) * batch,
    )
    answer = predict(asked if batch else best_batch(asked))
    if answer.training is None:
        return "how many epochs it takes is not known"
    half = math.log(answer.training.high / answer.training.value)
    group = calibration.calibrated().get((MLPERF, model, "", ""))
    if machine.nodes(int(gpus)) == 1 and group is not None:
        work = work_of(answer.question, preset)
        parts, nearness = group.parts(work, machine, without=source)
        half = half_width(nearness, 1)
        answer = replace(answer, training=answer.training * (parts.total / answer.parts.total))
    return answer, half, minutes


def _megatron(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Seconds per step of transformers under model parallelism."""
    single = [row for row in _megatron_singles() if not row.published.software.early]
    shares = [
        row.flops / row.gpus / row.published.seconds / row.published.machine.gpu.peak("mixed")
        for row in single
    ]
    for row in megatron.rows(rows, name):
        if isinstance(row, Unread):
            yield row
            continue
        machine = row.published.machine
        alike = [
            one for one in single if one.published.machine.gpu.generation == machine.gpu.generation
        ] or single
        last = max(alike, key=lambda one: one.gpus)
        per_gpu = last.flops / last.gpus / last.published.seconds
        if machine.gpu.generation != last.published.machine.gpu.generation:
            per_gpu *= machine.gpu.peak("mixed") / last.published.machine.gpu.peak("mixed")
        half = CLOSED_FORM + PER_DOUBLING * math.log2(row.nodes)
        half += OTHER_GENERATION / 2 if machine.gpu.generation in THROTTLED else 0.0
        yield Score(
            family=f"Megatron, {'one server' if row.nodes == 1 else 'several servers'}",
            source=row.source,
            what=f"{row.published.model.parameters / 1e9:.1f}B {machine.name} x{row.gpus}",
            unit="TFLOP/s",
            predicted=row.flops / row.seconds(calibration.kernels()) / 1e12,
            published=row.flops / row.published.seconds / 1e12,
            half=half,
            single=row.nodes == 1,
            gpus=row.gpus,
            constant=sum(shares) / len(shares) * machine.gpu.peak("mixed") / 1e12 * row.gpus,
            linear=per_gpu / 1e12 * row.gpus,
            group="megatron",
        )


@cache
def _megatron_singles() -> tuple[megatron.Step, ...]:
    found = megatron.rows(rows_of(DATA / "megatron_tables.csv"))
    return tuple(row for row in found if isinstance(row, megatron.Step) and row.nodes == 1)


GIB = 2.0**30
# Shapes and layouts of the figure that the memory rows were read from (arXiv:2205.05198, table 3).
_FIGURE: dict[str, tuple[Transformer, int, int, int]] = {
    "22B": (replace(GPTS["gpt-39b"], layers=48, hidden=6144, heads=64), 1, 4, 8),
    "175B": (GPTS["gpt3-175b"], 8, 1, 8),
    "530B": (GPTS["gpt-530b"], 35, 1, 8),
    "1T": (GPTS["gpt-1t"], 64, 1, 8),
}


def _memory(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Gibibytes per GPU: parameters with optimizer, and activations of two kinds of training."""
    for row in rows:
        notes, model = row.get("notes", ""), row.get("model", "").replace("GPT ", "")
        if "params+optimizer" not in notes:
            continue
        if model not in _FIGURE:
            yield Unread(source=f"{name}:{row['id']}", reason="its layout is not published")
            continue
        shape, pipeline, micro, tensor = _FIGURE[model]
        states, baseline, present = [number(part.split("=")[1]) for part in notes.split(";")][:3]
        interleaved = {8: 3, 35: 3, 64: 1}.get(pipeline, 1)
        layout = Layout(
            micro_batch=micro,
            micro_batches=4 * pipeline,
            tensor=tensor,
            pipeline=pipeline,
            interleaved=interleaved,
        )
        plain = memory.estimate(shape, layout, precision=memory.MEGATRON)
        # the figure's states are of the layers alone
        layers = memory.states(
            shape.layers * shape.layer_parameters / pipeline / tensor, precision=memory.MEGATRON
        )
        chosen = replace(layout, sequence_parallel=True, recompute="selective")
        small = memory.estimate(shape, chosen, precision=memory.MEGATRON)
        figures = (
            ("parameters and optimizer", layers.total, states),
            ("activations", plain.activations, baseline),
            ("activations, sequence parallel, selective", small.activations, present),
        )
        for what, predicted, published in figures:
            if published:
                yield Score(
                    family="memory",
                    source=f"{name}:{row['id']}",
                    what=f"{model} {what}",
                    unit="GiB",
                    predicted=predicted / GIB,
                    published=published,
                    half=0.1,
                    single=True,
                )


def _epochs(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Epochs to the target at one batch, by a curve through the other batches."""
    for benchmark, points in convergence.points(rows).items():
        if len(points) < 3:
            yield Unread(source=f"{name} {benchmark}", reason="fewer than three batches: no curve to judge")
            continue
        for point, error in zip(points, convergence.leave_one_out(points), strict=True):
            others = convergence.fit([other for other in points if other is not point])
            yield Score(
                family="epochs",
                source=f"{name} {benchmark}",
                what=f"{benchmark} at batch {point.batch:g}",
                unit="epochs",
                predicted=(1 + error) * point.epochs,
                published=point.epochs,
                half=others.half_width(point.batch),
                single=True,
            )


def _collectives(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Microseconds of an all-reduce inside one server. Interpolated, not judged."""
    for index, row in enumerate(rows):
        machine = machine_of(row["gpu"])
        size, gpus, published = number(row["bytes"]), number(row["n_gpus"]), number(row["time_us_oop"])
        if machine is None or not size or not gpus or not published:
            yield Unread(source=f"{name}:{index + 2}", reason="GPU, size or time cannot be read")
            continue
        yield Score(
            family="all-reduce (interpolated between its own rows)",
            source=f"{name}:{index + 2}",
            what=f"{row['gpu']} x{gpus:g}, {size / 2**20:g} MB",
            unit="us",
            predicted=1e6 * all_reduce(size, int(gpus), machine),
            published=published,
            half=0.1,
            single=True,
        )


def _sizes(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Share of the adapters' bandwidth by message size: a simulator's table, not a measurement."""
    machine = MACHINES["dgx-h100"]
    if "nic" not in name:
        yield Unread(
            source=name, reason="a simulator's table of links inside and all-to-all; nothing in Hora uses it"
        )
        return
    for index, row in enumerate(rows):
        size = number(row["Size"]) or 0.0
        for column, cell in row.items():
            nodes, published = number(column), number(cell)
            if not published or not nodes or "Node" not in column:
                continue
            servers = int(nodes)
            if servers == 1:
                predicted = bus_bandwidth(size, machine) / machine.intra
            else:
                ideal = (servers - 1) / servers * size / machine.inter
                predicted = ideal / gather(size, servers * machine.gpus, machine)
            yield Score(
                family="share of a network's bandwidth (a simulator's table)",
                source=f"{name}:{index + 2}",
                what=f"{size / 2**20:g} MB, {servers} servers",
                unit="share",
                predicted=predicted,
                published=published,
                half=0.5,
                single=True,
            )


PHASES = (("128", 7038), ("512", 1563))
"""Sequence lengths and steps of the published BERT recipe."""


def _hours(rows: Sequence[Row], name: str) -> Iterator[Score | Unread]:
    """Hours of whole trainings whose recipe is published: BERT-large with LAMB."""
    for index, row in enumerate(rows):
        source, text = f"{name}:{index + 2}", row["workload"]
        machine = machine_of(row["system"])
        hours, gpus = number(row["time_hours"]), number(row["gpus"])
        if "TPU" in row["system"] or machine is None:
            yield Unread(source=source, reason=f"no preset resembles {row['system']}")
            continue
        if "BERT" not in text or not hours or not gpus:
            yield Unread(source=source, reason=f"{text}: how many epochs it took is not published")
            continue
        precision = "tf32" if row["precision"] == "TF32" else "mixed"
        whole, nearest = 0.0, 1.0
        for (sequence, steps), cell in zip(
            PHASES, (row["phase1_batch_per_gpu_accum"], row["phase2"]), strict=True
        ):
            share = BERT_GLOBAL[sequence] / gpus
            accumulation = number(cell.split("(")[1]) if "(" in cell else None
            micro = share / accumulation if accumulation else min(64.0 if sequence == "128" else 8.0, share)
            work = Work(
                gpus=int(gpus),
                batch=micro,
                micro_batches=share / micro,
                precision=precision,  # type: ignore[arg-type]
                gradients=WORKLOADS["bert-large"].parameters * (2 if precision == "mixed" else 4),
            )
            found = calibration.calibrated()["PyTorch", "bert-large", "pretrain", sequence]
            parts, nearness = found.parts(work, machine)
            whole, nearest = whole + steps * parts.total, min(nearest, nearness)
        nodes = machine.nodes(int(gpus))
        yield Score(
            family=f"hours of BERT, {'one server' if nodes == 1 else 'several servers'}",
            source=source,
            what=f"{row['framework_release']} {machine.name} x{gpus:g}",
            unit="h",
            gpus=int(gpus),
            predicted=whole / 3600,
            published=hours,
            half=half_width(nearest, nodes),
            single=nodes == 1,
        )

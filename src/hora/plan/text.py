"""A prediction, a sweep, a search: as lines for a console and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hora.core.plural import plural
from hora.plan.memory import Layout
from hora.plan.question import Interval, Prediction
from hora.plan.search import Deadline

__all__ = [
    "as_dict",
    "compared",
    "deadline_lines",
    "lines",
    "search_lines",
    "sweep_lines",
    "table",
    "time",
]

UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
GB = 1e9


def time(seconds: float) -> str:
    """In the unit that reads best."""
    for size, unit in UNITS:
        if seconds >= 2 * size or unit == "ms":
            return f"{_short(seconds / size)} {unit}"
    raise AssertionError


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(value: Interval, show: Any = time) -> str:
    return f"{show(value.value)}  ({show(value.low)} to {show(value.high)})"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def lines(found: Prediction) -> list[str]:
    """One prediction for a person."""
    asked, parts = found.question, found.parts
    nodes = asked.machine.nodes(asked.gpus)
    head = f"{asked.name} on {asked.gpus:,} {plural(asked.gpus, 'GPU')} ({nodes:,} x {asked.machine.name}), "
    out = [f"{head}global batch {found.batch:,.0f} {found.unit}, {asked.precision}"]
    if found.layout is not None:
        out.append(f"  layout        {layout_text(found.layout)}")
    out.append(f"  step          {_spread(found.step)}")
    shares = {"compute": parts.compute, **parts.communication}
    shares |= {"bubble": parts.bubble, "optimizer": parts.optimizer, "stragglers": parts.stragglers}
    for name, seconds in shares.items():
        if seconds > 0:
            what = f"{name} exposed" if name in parts.communication else name
            out.append(f"    {what:<20} {time(seconds):>9}  {100 * seconds / parts.total:4.0f} %")
    out.append(f"  throughput    {_spread(found.rate, _short)} {found.unit}/s")
    per = found.rate.value / asked.gpus
    if found.layout is None:
        base = "one server" if nodes > 1 else "one GPU"
        out.append(
            f"                {_short(per)} per GPU; scaling efficiency {found.efficiency:.0%} of {base}"
        )
    else:
        out.append(
            f"                {found.flops / 1e12:.0f} TFLOP/s per GPU, {found.utilization:.0%} of the peak"
        )
    out += _memory_lines(found)
    if found.training is not None and found.epochs is not None:
        out.append(f"  time to train {_spread(found.training)}, {found.epochs.value:.3g} epochs")
    if found.energy is not None:
        out.append(f"  energy        {_spread(found.energy, lambda kwh: f'{_short(kwh)} kWh')}")
    if found.price is not None:
        out.append(f"  price         {_spread(found.price, _short)}")
    lost = found.goodput
    out.append(
        f"  failures      one in {time(lost.mtbf)}; a checkpoint every {time(lost.interval)} keeps "
        f"{lost.fraction:.2%} of the time"
    )
    out.append(f"  leans on      {found.basis}; ranges hold 80 %")
    return out


def layout_text(layout: Layout) -> str:
    """Tensor x pipeline x data, and what else differs from nothing."""
    parts = [f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"]
    parts.append(f"{layout.micro_batches} micro-batches of {layout.micro_batch}")
    if layout.interleaved > 1:
        parts.append(f"interleaved {layout.interleaved}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.zero:
        parts.append(f"ZeRO {layout.zero}")
    return ", ".join(parts)


def _memory_lines(found: Prediction) -> list[str]:
    held = found.held
    if held is None:
        return []
    capacity = found.capacity / GB
    out = [
        f"  memory        {held.total / GB:.1f} of {capacity:.0f} GB: parameters {held.parameters / GB:.1f}, "
        f"gradients {held.gradients / GB:.1f}, optimizer {held.optimizer / GB:.1f}, "
        f"activations {held.activations / GB:.1f}, other {held.other / GB:.1f}"
    ]
    if not found.fits:
        out.append("                DOES NOT FIT. What would make it fit, each on top of those before:")
        for change in found.changes:
            fits = "fits" if change.fits else "not yet"
            out.append(f"                - {change.what}: {change.memory.total / GB:.1f} GB, {fits}")
        if not any(change.fits for change in found.changes):
            out.append("                - nothing that is known here: more GPUs, or GPUs with more memory")
    return out


def sweep_lines(found: Sequence[Prediction]) -> list[str]:
    """A row for each number of GPUs."""
    head = ["GPUs", "batch", "step", "per second", "efficiency", "time to train", "80 %"]
    rows = [head]
    for one in found:
        trained = one.training
        rows.append(
            [
                f"{one.question.gpus:,}",
                f"{one.batch:,.0f}",
                time(one.step.value),
                _short(one.rate.value),
                f"{one.efficiency:.0%}" if one.layout is None else f"{one.utilization:.0%} of peak",
                time(trained.value) if trained else "-",
                f"{time(trained.low)} to {time(trained.high)}" if trained else "-",
            ]
        )
    return table(rows)


def search_lines(found: Sequence[Prediction]) -> list[str]:
    """The layouts, fastest first; or the one that lacks least."""
    if not found[0].fits:
        return ["No layout fits. The one that lacks least:", *lines(found[0])]
    rows = [["layout", "step", "of peak", "memory"]]
    for one in found:
        assert one.layout is not None
        assert one.held is not None
        rows.append(
            [
                layout_text(one.layout),
                time(one.step.value),
                f"{one.utilization:.0%}",
                f"{one.held.total / GB:.0f} of {one.capacity / GB:.0f} GB",
            ]
        )
    return [*table(rows), "", *lines(found[0])]


def compared(left: Prediction, right: Prediction) -> list[str]:
    """How much faster the second machine is."""
    pair = (left, right)
    rows = [["", *(f"{one.question.gpus} GPUs of {one.question.machine.name}" for one in pair)]]
    rows.append(["step", *(_spread(one.step) for one in pair)])
    rows.append(["throughput", *(_spread(one.rate, _short) for one in pair)])
    if left.training is not None and right.training is not None:
        rows.append(["time to train", *(_spread(one.training) for one in pair if one.training)])
    if left.energy is not None and right.energy is not None:
        rows.append(["energy", *(f"{_short(one.energy.value)} kWh" for one in pair if one.energy)])
    ratio = right.rate.value / left.rate.value
    name = right.question.machine.name
    verb = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    out = [*table(rows), "", f"{name} is {verb} as {left.question.machine.name} in {left.unit} per second."]
    if ratio < 1:
        out[-1] = out[-1].replace(" as ", " than ", 1)
    if left.training is not None and right.training is not None:
        out.append(f"Time to train: a factor of {left.training.value / right.training.value:.2f}.")
    return out


def deadline_lines(found: Deadline) -> list[str]:
    """How many GPUs, or how near one comes."""
    machine = found.fastest.question.machine.name
    if found.likely is None or found.likely.training is None:
        best = found.fastest
        assert best.training is not None
        return [
            f"No number of {machine} GPUs reaches the target in {time(found.seconds)}: the fastest is "
            f"{best.question.gpus:,} with {_spread(best.training)}."
        ]
    out = [
        f"{found.likely.question.gpus:,} GPUs of {machine} reach the target in "
        f"{_spread(found.likely.training)}."
    ]
    if found.safe is None:
        out.append(f"No number of GPUs holds {time(found.seconds)} with nine chances in ten.")
    else:
        assert found.safe.training is not None
        out.append(
            f"{found.safe.question.gpus:,} hold it with nine chances in ten: {_spread(found.safe.training)}."
        )
    return [*out, "", *lines(found.likely)]


def as_dict(found: Prediction) -> dict[str, Any]:
    """Plain values: seconds, bytes, kWh; intervals as low, value, high."""

    def interval(value: Interval | None) -> dict[str, float] | None:
        return None if value is None else {"low": value.low, "value": value.value, "high": value.high}

    asked, held = found.question, found.held
    return {
        "model": asked.name,
        "machine": asked.machine.name,
        "gpus": asked.gpus,
        "batch": found.batch,
        "unit": found.unit,
        "precision": asked.precision,
        "layout": layout_text(found.layout) if found.layout else None,
        "step": interval(found.step),
        "parts": {
            "compute": found.parts.compute,
            "stragglers": found.parts.stragglers,
            "bubble": found.parts.bubble,
            "optimizer": found.parts.optimizer,
            **found.parts.communication,
        },
        "rate": interval(found.rate),
        "efficiency": found.efficiency if found.layout is None else None,
        "utilization": found.utilization if found.layout is not None else None,
        "memory": None
        if held is None
        else {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": held.activations,
            "other": held.other,
            "total": held.total,
            "capacity": found.capacity,
            "fits": found.fits,
            "changes": [change.what for change in found.changes],
        },
        "epochs": interval(found.epochs),
        "time_to_train": interval(found.training),
        "energy_kwh": interval(found.energy),
        "price": interval(found.price),
        "goodput": found.goodput.fraction,
        "checkpoint_every": found.goodput.interval,
        "basis": found.basis,
    }

"""What speaks for each known cause in the records of two runs, and what its removal needs to know."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.recording import Step, difference
from hora.verify.compare import Tolerance
from hora.verify.runs import Run

__all__ = [
    "Pair",
    "averaging_removals",
    "averaging_seen",
    "averaging_why",
    "clipping_removals",
    "clipping_seen",
    "growth",
    "initial_plan",
    "initial_seen",
    "initial_why",
    "random_seen",
    "rates_plan",
    "rates_seen",
    "rates_why",
    "samples_plan",
    "samples_seen",
    "samples_why",
    "tail_plan",
    "tail_seen",
    "unfollowed",
    "uses",
    "weighting_plan",
    "weighting_seen",
]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run with one worker and one with several, and the step, from 0, at which they part.

    Attributes:
        one: the run with one worker.
        many: the run with several.
        step: where they part.
        base: the first two runs of all, whose batches a replay uses; None if these are they.
    """

    one: Run
    many: Run
    step: int
    base: Pair | None = None

    @property
    def first(self) -> Pair:
        """The runs without any change."""
        return self if self.base is None else self.base


def growth(pair: Pair) -> float:
    """How many times the global batch of the first step with several workers is that of one."""
    one, many = _rows(pair.one.steps[0]), _rows(pair.many.steps[0])
    return many / one if one and many else 1.0


# --- samples ------------------------------------------------------------------------------------


def samples_seen(pair: Pair) -> str:
    last = min(pair.step, len(pair.one.steps) - 1, len(pair.many.steps) - 1)
    for step in range(last + 1):
        if _source(pair.one, step) == _source(pair.many, step) != "seen" and (
            pair.one.samples(step) != pair.many.samples(step)
        ):
            return f"other samples in step {step + 1}"
    if len(pair.one.steps) != len(pair.many.steps) and pair.step >= min(
        len(pair.one.steps), len(pair.many.steps)
    ):
        return "another number of steps"
    return ""


def samples_why(pair: Pair) -> str:
    last = min(pair.step, len(pair.one.steps) - 1, len(pair.many.steps) - 1)
    step = next(
        step for step in range(last + 1) if pair.one.samples(step) != pair.many.samples(step) or step == last
    )
    one, many = pair.one.samples(step), pair.many.samples(step)
    workers, here = pair.many.workers, f"step {step + 1}"
    twice = len(many) - len(set(many))
    if twice * 2 >= len(set(many)) and len(one) == len(set(one)):
        return (
            f"Workers use the same samples: in {here} {workers} workers use {len(many)} samples, of which "
            f"only {len(set(many))} are different; one worker uses {len(one)} different ones."
        )
    before = {sample for index in range(step) for sample in pair.many.samples(index)}
    if len(one) < len(many) and before.issuperset(set(many) - set(one)):
        return (
            f"A sampler pads the last batch: {here} uses {len(one)} samples with 1 worker and {len(many)} "
            f"with {workers}, those of earlier steps again."
        )
    if len(one) != len(many):
        return (
            f"The global batch depends on the number of workers: {here} uses {len(one)} samples with 1 "
            f"worker and {len(many)} with {workers}, as when each worker takes a batch of a fixed size."
        )
    if one == many:
        return (
            f"One run ends earlier: {len(pair.one.steps)} steps with 1 worker, {len(pair.many.steps)} with "
            f"{workers}."
        )
    return (
        f"The order of samples depends on the number of workers: of the {len(one)} samples of {here}, "
        f"{len(set(one) & set(many))} are the same in both runs"
        + (f", and the {workers} workers use {twice} twice." if twice else ".")
    )


def unfollowed(pair: Pair) -> str:
    """What to say where the runs used other samples that cannot be replayed; empty where they did not."""
    last = min(pair.step, len(pair.one.steps) - 1, len(pair.many.steps) - 1)
    for step in range(last + 1):
        one, many = pair.one.samples(step), pair.many.samples(step)
        seen = "seen" in (_source(pair.one, step), _source(pair.many, step))
        if seen and one != many:
            counts = f"{len(one)} with 1 worker, {len(many)} with {pair.many.workers}"
            return (
                f"In step {step + 1} the models were called with other rows ({counts}). Where they come from "
                "could not be followed, so that neither order nor overlap of samples could be tried."
            )
    return ""


def samples_plan(pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    first = pair.first
    return {"replay": first.many.plan.folder, "factor": growth(first)}, {}


def _rows(step: Sequence[Step]) -> int:
    return sum(batch.rows for rank in step for batch in rank.batches)


def _source(run: Run, step: int) -> str:
    found = {batch.source for rank in run.steps[step] for batch in rank.batches if batch.rows}
    return "seen" if len(found) != 1 else found.pop()


# --- learning rate ------------------------------------------------------------------------------


def _rates_expected(pair: Pair) -> list[list[float]]:
    first = pair.first
    factor = growth(first)
    return [[rate * factor for rate in step[0].rates] for step in first.one.steps]


def rates_seen(pair: Pair) -> str:
    for step, expected in enumerate(_rates_expected(pair)[: pair.step + 1]):
        if step < len(pair.many.steps) and not _alike(expected, pair.many.steps[step][0].rates):
            return f"{pair.many.steps[step][0].rates[0]:g} instead of {expected[0]:g} in step {step + 1}"
    return ""


def rates_why(pair: Pair) -> str:
    first = pair.first
    factor, workers = growth(first), pair.many.workers
    expected = _rates_expected(pair)
    step = next(
        step
        for step, rates in enumerate(expected)
        if step >= len(first.many.steps) or not _alike(rates, first.many.steps[step][0].rates)
    )
    mine, theirs = first.one.steps[step][0].rates[0], first.many.steps[step][0].rates[0]
    ratio = theirs / mine if mine else float("inf")
    text = f"In step {step + 1} it is {mine:g} with 1 worker and {theirs:g} with {workers}"
    text += f", {ratio:.4g} times as much"
    if factor == 1.0:
        return f"{text}, although the global batch is the same."
    grown = f"while the global batch is {factor:g} times as large"
    if abs(ratio - 1) < 1e-6:
        return f"It is not scaled: {mine:g} in both runs, {grown}."
    twice = ": it is scaled twice" if abs(ratio - factor**2) < 1e-6 * ratio else ""
    return f"{text}, {grown}{twice}."


def rates_plan(pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"rates": _rates_expected(pair)}


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )


# --- first parameters ---------------------------------------------------------------------------


def initial_seen(pair: Pair) -> str:
    found = _initial_differences(pair)
    if not found:
        return ""
    numbers, name = found
    if len(numbers) == pair.many.workers > 1:
        return f"{pair.many.workers} workers start with another {name} than 1 worker"
    return f"rank {numbers[0]} starts with another {name}"


def initial_why(pair: Pair) -> str:
    found = _initial_differences(pair)
    if found and len(found[0]) == pair.many.workers > 1:
        return (
            f"Every run starts from parameters of its own: {initial_seen(pair)}. The script draws them from "
            "a seed that changes, such as the time or the number of workers."
        )
    return f"The workers do not start from the same parameters: {initial_seen(pair)}."


def _initial_differences(pair: Pair) -> tuple[list[int], str] | None:
    """Ranks whose first parameters are not those of the one worker, and the first parameter of them."""
    tolerance = Tolerance.of(pair.one).per_step
    for one, many in zip(pair.one.steps, pair.many.steps, strict=False):
        for name, print_ in one[0].before.items():
            others = [rank.before.get(name, print_) for rank in many]
            numbers = [
                number
                for number, other in enumerate(others)
                if difference(print_, other) > tolerance * max(print_[0], other[0])
            ]
            if numbers:
                return numbers, name
    return None


def initial_plan(pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"initial": folder / "initial"}, {"initial": folder / "initial"}


# --- gradients ----------------------------------------------------------------------------------


def averaging_seen(pair: Pair) -> str:
    step = _step(pair, pair.many)
    if step is None:
        return ""
    tolerance = Tolerance.of(pair.one).per_step
    for number, rank in enumerate(step[1:], 1):
        for name, print_ in rank.gradients.items():
            mine = step[0].gradients.get(name, [0.0] * len(print_))
            if difference(mine, print_) > tolerance * max(step[0].norm, rank.norm):
                return f"ranks 0 and {number} step with different gradients"
    ratio = _ratio(pair)
    for factor, text in ((pair.many.workers, "times as large"), (1 / pair.many.workers, "of the size")):
        if abs(ratio - factor) < 0.05 * factor:
            return f"the gradient is {ratio:.3g} {text}"
    return ""


def averaging_removals(pair: Pair) -> tuple[str, ...]:
    seen = averaging_seen(pair)
    if seen.startswith("ranks"):
        return ("averaging",)
    return ("summed",) if seen.endswith("large") else ("once-averaged",)


def averaging_why(pair: Pair) -> str:
    seen = averaging_seen(pair)
    if seen.startswith("ranks"):
        return f"Gradients are not averaged over the workers: {seen}."
    if seen.endswith("large"):
        return f"Gradients are added up over the workers, not averaged: {seen} as with 1 worker."
    return f"Gradients are divided by the number of workers twice: {seen} that it has with 1 worker."


def _ratio(pair: Pair) -> float:
    one, many = _step(pair, pair.one), _step(pair, pair.many)
    if one is None or many is None or not one[0].norm:
        return 0.0
    return many[0].norm / one[0].norm


def _step(pair: Pair, run: Run) -> list[Step] | None:
    return run.steps[pair.step] if pair.step < len(run.steps) else None


# --- weights and windows ------------------------------------------------------------------------


def weighting_seen(pair: Pair) -> str:
    for run in (pair.many, pair.one):
        step = _step(pair, run)
        counts = {tuple(batch.counts) for rank in step or () for batch in rank.batches}
        if len(counts) > 1 and len({len(places) for places in counts}) == 1:
            places = zip(*counts, strict=True)
            low, high = next((min(place), max(place)) for place in places if len(set(place)) > 1)
            return f"means over {low:g} to {high:g} values count alike"
    return ""


def weighting_plan(pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"weights": _weights(pair.one)}, {"weights": _weights(pair.many)}


def _weights(run: Run) -> list[list[list[list[float]]]]:
    """By rank, step, pass and mean: its count over the mean count of all ranks and passes of the step."""
    table: list[list[list[list[float]]]] = [[] for _ in run.ranks]
    for step in run.steps:
        batches = [batch for rank in step for batch in rank.batches]
        alike = len({len(batch.counts) for batch in batches}) == 1
        means = (
            [statistics.fmean(place) for place in zip(*(b.counts for b in batches), strict=True)]
            if alike
            else []
        )
        for rank, rows in zip(step, table, strict=True):
            rows.append(
                [
                    [count / mean if mean else 1.0 for count, mean in zip(batch.counts, means, strict=False)]
                    for batch in rank.batches
                ]
            )
    return table


def tail_seen(pair: Pair) -> str:
    for run in (pair.many, pair.one):
        factors = _windows(run)
        if pair.step < len(factors) and factors[pair.step] != 1.0:
            passes = run.passes(pair.step)
            workers = "1 worker" if run.workers == 1 else f"{run.workers} workers"
            usual = round(passes * factors[pair.step])
            return f"with {workers} step {pair.step + 1} has {passes} of {usual} passes"
    return ""


def tail_plan(pair: Pair, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"windows": _windows(pair.one)}, {"windows": _windows(pair.many)}


def _windows(run: Run) -> list[float]:
    """By step: the usual number of passes of its optimizer over the number that it has, at least 1."""
    usual: dict[int, int] = {}
    for optimizer in {step[0].optimizer for step in run.steps}:
        counts = collections.Counter(
            run.passes(index) for index, step in enumerate(run.steps) if step[0].optimizer == optimizer
        )
        usual[optimizer] = max(counts, key=lambda count: (counts[count], count))
    factors = []
    for index, step in enumerate(run.steps):
        passes = run.passes(index)
        factors.append(max(usual[step[0].optimizer] / passes, 1.0) if passes else 1.0)
    return factors


# --- what the model does ------------------------------------------------------------------------


def uses(what: str) -> Callable[[Pair], str]:
    def seen(pair: Pair) -> str:
        steps = [rank for step in pair.many.steps[: pair.step + 1] for rank in step]
        return what if any(what in step.uses for step in steps) else ""

    return seen


def random_seen(pair: Pair) -> str:
    found = [what for what in ("dropout", "random numbers") if uses(what)(pair)]
    for one, many in zip(pair.one.steps[: pair.step + 1], pair.many.steps, strict=False):
        mine, theirs = _content(one), _content(many)
        if any(mine[name] != theirs[name] for name in mine.keys() & theirs.keys()):
            found.append("the same samples with other content")
            break
    return ", ".join(found)


def _content(step: Sequence[Step]) -> dict[str, str]:
    batches = [batch for rank in step for batch in rank.batches if batch.content]
    return {name: text for batch in batches for name, text in zip(batch.samples, batch.content, strict=True)}


def clipping_removals(pair: Pair) -> tuple[str, ...]:
    return ("clipping",) if uses("clipping")(pair) else ("unclipped",)


def clipping_seen(pair: Pair) -> str:
    if uses("clipping")(pair):
        return "clip_grad_norm_ or clip_grad_value_"
    one = _step(pair, pair.one)
    if one is not None and abs(one[0].raw_norm - one[0].norm) > 1e-4 * one[0].norm:
        return "gradients are changed between backward() and step()"
    return ""

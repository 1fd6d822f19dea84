"""Where two recorded runs part, and by how much.

**Measures.** A gradient's difference is taken relative to the norm of all gradients together, a parameter's
relative to its own norm (or, if that is tiny, to a hundredth of what its size would have at the model's root
mean square). The norm of a difference is estimated from 8 random projections.

**Tolerance.** Rounding gives each step a relative error of some multiple of the dtype's epsilon, and the
errors of the steps add up: ``factor * epsilon * step``. The factor is 256 for float32 and 8 for half
precision, where a run in float64 decides in case of doubt, and 4096 for float64, where nothing wider can:
at step 1 that is 3.1e-5 in float32 and 9.1e-13 in float64.

**Parameters without a gradient of their own.** A bias in front of a batch norm, say, has a gradient that is
zero but for rounding, which Adam blows up to full steps. A parameter whose gradient has been below
``factor * epsilon`` of all gradients together in both runs is left out, and buffers, such as the running
mean behind that bias, may differ by ten times what those parameters do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hora.core.recording import Step, difference
from hora.verify.runs import Run

__all__ = ["Comparison", "Parting", "Tolerance", "compare"]

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_FACTOR = {"float64": 4096.0, "float32": 256.0, "float16": 8.0, "bfloat16": 8.0}
_FLOOR = 0.01
_DRIFT = 10.0


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding.

    Attributes:
        dtype: of the parameters; the narrowest, if there are several.
        per_step: relative difference that each step may add.
    """

    dtype: str
    per_step: float

    @classmethod
    def of(cls, run: Run) -> Tolerance:
        """The tolerance for what a run computes in."""
        found = {dtype for rank in run.ranks if rank.ending for dtype in rank.ending.dtypes}
        known = [dtype for dtype in found if dtype in _EPSILON] or ["float32"]
        dtype = max(known, key=_EPSILON.__getitem__)
        return cls(dtype, _FACTOR[dtype] * _EPSILON[dtype])

    def at(self, step: int) -> float:
        """The largest relative difference at a step; the first is 1."""
        return self.per_step * step


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where two runs part for the first time.

    Attributes:
        step: the first is 1.
        what: "gradient", "parameter", "buffer", "learning rate", or "end" where one of them ends earlier.
        name: of the tensor.
        rank: of the run with several workers.
        relative: the difference.
        tolerance: at that step.
        one: the value with one worker, where it is a number.
        many: the value with several.
    """

    step: int
    what: str
    name: str = ""
    rank: int = 0
    relative: float = math.inf
    tolerance: float = 0.0
    one: float = math.nan
    many: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, step by step.

    Attributes:
        steps: that both made and that were compared.
        largest: relative difference of any parameter or buffer, up to where they part.
        parting: None when they agree throughout.
        tolerance: that was applied.
    """

    steps: int
    largest: float
    parting: Parting | None
    tolerance: Tolerance


def compare(one: Run, many: Run) -> Comparison:
    """Compare a run with one worker with one with several, all ranks of it."""
    tolerance = Tolerance.of(one)
    largest = 0.0
    loud: set[str] = set()
    sizes: dict[str, int] = {}
    steps = min(len(one.steps), len(many.steps))
    for index in range(steps):
        (reference,), ranks = one.steps[index], many.steps[index]
        sizes |= reference.sizes
        for record in (reference, *ranks):
            loud |= _loud(record, tolerance.per_step)
        found: list[Parting] = []
        for number, rank in enumerate(ranks):
            differences = _differences(reference, rank, sizes)
            silent = [row for row in differences if row[0] == "parameter" and row[1] not in loud]
            drifted = max((relative for _, _, relative, _ in silent), default=0.0)
            for row in differences:
                what, name, relative, pair = row
                if row in silent:
                    continue
                limit = tolerance.at(index + 1)
                if what in ("parameter", "buffer") and relative <= limit:
                    largest = max(largest, relative)
                if what == "buffer":
                    limit += _DRIFT * drifted
                if not relative <= limit:
                    found.append(
                        Parting(
                            step=index + 1,
                            what=what,
                            name=name,
                            rank=number,
                            relative=relative,
                            tolerance=limit,
                            one=pair[0],
                            many=pair[1],
                        )
                    )
        if found:
            order = ("gradient", "parameter", "learning rate", "buffer")
            worst = min(found, key=lambda parting: (order.index(parting.what), -parting.relative))
            largest = max(found, key=lambda parting: parting.relative).relative
            return Comparison(steps=steps, largest=largest, parting=worst, tolerance=tolerance)
    ended = None
    if len(one.steps) != len(many.steps):
        ended = Parting(step=steps + 1, what="end", one=len(one.steps), many=len(many.steps))
    return Comparison(steps=steps, largest=largest, parting=ended, tolerance=tolerance)


def _loud(step: Step, share: float) -> set[str]:
    """Parameters whose gradient is more than rounding."""
    return {name for name, print_ in step.gradients.items() if not print_[0] <= share * step.norm}


def _differences(
    one: Step, other: Step, sizes: Mapping[str, int]
) -> list[tuple[str, str, float, tuple[float, float]]]:
    """What, name, relative difference and both values of everything that a step wrote down."""
    found = []
    norm = max(one.norm, other.norm)
    for name in sorted(one.gradients.keys() | other.gradients.keys()):
        mine, theirs = one.gradients.get(name), other.gradients.get(name)
        nothing = [0.0] * len(mine or theirs or [])
        distance = difference(mine or nothing, theirs or nothing)
        values = ((mine or nothing)[0], (theirs or nothing)[0])
        found.append(("gradient", name, distance / norm if norm else 0.0, values))
    for place, (mine_rate, their_rate) in enumerate(zip(one.rates, other.rates, strict=False)):
        scale = max(abs(mine_rate), abs(their_rate))
        relative = abs(mine_rate - their_rate) / scale if scale else 0.0
        found.append(
            ("learning rate", f"group {place}", relative if relative > 1e-6 else 0.0, (mine_rate, their_rate))
        )
    for what, mine_all, their_all in (
        ("parameter", one.parameters, other.parameters),
        ("buffer", one.buffers, other.buffers),
    ):
        elements = sum(sizes.get(name, 0) for name in mine_all)
        square = sum(print_[0] ** 2 for print_ in mine_all.values() if math.isfinite(print_[0]))
        typical = math.sqrt(square / elements) if elements else 0.0
        for name in sorted(mine_all.keys() & their_all.keys()):
            mine, theirs = mine_all[name], their_all[name]
            floor = _FLOOR * typical * math.sqrt(sizes.get(name, 0))
            scale = max(mine[0], theirs[0], floor)
            distance = difference(mine, theirs)
            found.append((what, name, distance / scale if scale else 0.0, (mine[0], theirs[0])))
    return found

"""Where two recorded runs part, and by how much.

**Measures.** A gradient's difference is taken relative to the norm of all gradients together, a parameter's
relative to its own norm (or, if that is tiny, to a hundredth of what its size would have at the model's root
mean square). The norm of a difference is estimated from 8 random projections.

**Tolerance.** Rounding gives each step a relative error of some multiple of the dtype's epsilon, and the
errors of the steps add up: ``factor * epsilon * step``. The factor is 256 for float32 and 8 for half
precision, where a run in float64 decides in case of doubt, and 4096 for float64, where nothing wider can:
at step 1 that is 3.1e-5 in float32 and 9.1e-13 in float64.

**Gradients that are nothing but rounding.** A bias in front of a batch norm, or of the keys of an attention,
has a gradient that is zero but for rounding, which Adam blows up to full steps. What the steps have changed
in elements whose gradient is below ``factor * epsilon`` of all gradients together is allowed to differ, and
buffers, such as the running mean behind such a bias, may differ by ten times as much.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hora.core.recording import EPSILON, Step, difference, rounding
from hora.verify.runs import Run

__all__ = ["Comparison", "Parting", "Tolerance", "compare"]

_FLOOR = 0.01
_DRIFT = 10.0
_RATE = 1e-6
"""Learning rates are computed in float64 by the script, or in float32 where they are tensors."""


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
        known = [dtype for dtype in found if dtype in EPSILON] or ["float32"]
        dtype = max(known, key=EPSILON.__getitem__)
        return cls(dtype, rounding(dtype))

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
        steps: that both made and that were compared; up to where both overflow.
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
    noise: dict[str, float] = collections.defaultdict(float)
    sizes: dict[str, int] = {}
    steps = min(len(one.steps), len(many.steps))
    for index in range(steps):
        (reference,), ranks = one.steps[index], [_renamed(rank, one, index) for rank in many.steps[index]]
        if not (_finite(reference) or any(_finite(rank) for rank in ranks)):
            return Comparison(steps=index, largest=largest, parting=None, tolerance=tolerance)
        sizes |= reference.sizes
        for name, value in reference.noise.items():
            noise[name] += value + max(rank.noise.get(name, 0.0) for rank in ranks)
        limit = tolerance.at(index + 1)
        found: list[Parting] = []
        for number, rank in enumerate(ranks):
            rows = _differences(reference, rank, sizes)
            drift = max(
                (noise[row.name] / row.scale for row in rows if row.what == "parameter" and row.scale),
                default=0.0,
            )
            for row in rows:
                allowed = limit
                if row.what == "parameter" and row.scale:
                    allowed += noise[row.name] / row.scale
                elif row.what == "buffer":
                    allowed += _DRIFT * drift
                if row.what in ("parameter", "buffer") and row.relative <= limit:
                    largest = max(largest, row.relative)
                if not row.relative <= allowed:
                    found.append(
                        Parting(
                            step=index + 1,
                            what=row.what,
                            name=row.name,
                            rank=number,
                            relative=row.relative,
                            tolerance=allowed,
                            one=row.one,
                            many=row.many,
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


def _finite(step: Step) -> bool:
    return all(
        math.isfinite(norm) for norm in (step.norm, *(print_[0] for print_ in step.parameters.values()))
    )


@dataclass(frozen=True)
class _Row:
    """One tensor, or rate, of two steps."""

    what: str
    name: str
    relative: float
    scale: float
    one: float
    many: float


def _renamed(step: Step, one: Run, index: int) -> Step:
    """The step under the names that the run with one worker has, where it has as many parameters."""
    reference = one.steps[index][0]
    if step.parameters.keys() == reference.parameters.keys() or len(step.parameters) != len(
        reference.parameters
    ):
        return step
    names = dict(zip(step.parameters, reference.parameters, strict=True))
    return dataclasses.replace(
        step,
        parameters={names[name]: value for name, value in step.parameters.items()},
        gradients={names[name]: value for name, value in step.gradients.items()},
        noise={names[name]: value for name, value in step.noise.items()},
    )


def _differences(one: Step, other: Step, sizes: Mapping[str, int]) -> list[_Row]:
    """Everything that a step wrote down."""
    found = []
    norm = max(one.norm, other.norm)
    for name in sorted(one.gradients.keys() | other.gradients.keys()):
        mine, theirs = one.gradients.get(name), other.gradients.get(name)
        nothing = [0.0] * len(mine or theirs or [])
        distance = difference(mine or nothing, theirs or nothing)
        relative = distance / norm if norm else 0.0
        found.append(_Row("gradient", name, relative, norm, (mine or nothing)[0], (theirs or nothing)[0]))
    for place, (mine_rate, their_rate) in enumerate(zip(one.rates, other.rates, strict=False)):
        scale = max(abs(mine_rate), abs(their_rate))
        relative = abs(mine_rate - their_rate) / scale if scale else 0.0
        relative = relative if relative > _RATE else 0.0
        found.append(_Row("learning rate", f"group {place}", relative, scale, mine_rate, their_rate))
    for what, mine_all, their_all in (
        ("parameter", one.parameters, other.parameters),
        ("buffer", one.buffers, other.buffers),
    ):
        elements = sum(sizes.get(name, 0) for name in mine_all)
        square = sum(print_[0] * print_[0] for print_ in mine_all.values() if math.isfinite(print_[0]))
        typical = math.sqrt(square / elements) if elements else 0.0
        for name in sorted(mine_all.keys() & their_all.keys()):
            mine, theirs = mine_all[name], their_all[name]
            scale = max(mine[0], theirs[0], _FLOOR * typical * math.sqrt(sizes.get(name, 0)))
            relative = difference(mine, theirs) / scale if scale else 0.0
            found.append(_Row(what, name, relative, scale, mine[0], theirs[0]))
    return found

"""Means over all ranks, weighted by what each mean is made of: sums and weights travel, never means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from hora.adapter.context import Context
from hora.adapter.guard import collective
from hora.core.errors import CollectiveError

__all__ = ["check_weight", "mean", "refuse_names"]


def mean(context: Context, values: Mapping[str, float], weight: float) -> dict[str, float]:
    """The mean over all ranks of each value, where each rank's counts ``weight`` times.

    Sums are exact: the products are added up without rounding in between.

    Args:
        context: the job.
        values: this rank's, by name; the same names on all.
        weight: how much they count, 0 or more. A value of weight 0 is ignored, even nan.

    Returns:
        The means by name, in the order of ``values``; nan where all weights are 0.

    Raises:
        CollectiveError: a negative weight, or, on every rank, names that differ between ranks.
        WorldError: a rank does not come in time, or has ended.
    """
    check_weight(weight)
    names = sorted(values)
    told = [(weight, dict(values))]
    if context.world.size > 1:
        with (
            context.timeline.span("mean", lane="collectives"),
            collective(context, "mean", label=", ".join(names) or None),
        ):
            everyone = context.exchange("mean", json.dumps([weight, dict(values)]).encode())
        told = [(other[0], other[1]) for other in map(json.loads, everyone)]
        if any(sorted(theirs) != names for _, theirs in told):
            raise refuse_names(context.world.rank, names)
    total = math.fsum(share for share, _ in told)
    return {
        name: _sum(share * theirs[name] for share, theirs in told if share) / total if total else math.nan
        for name in values
    }


def check_weight(weight: float) -> None:
    """Raise CollectiveError for a weight that is negative or nan."""
    if not weight >= 0:
        raise CollectiveError(f"mean: weight={weight} is negative or nan.", fix="Give the number of samples.")


def refuse_names(rank: int, names: list[str]) -> CollectiveError:
    """What all ranks raise when their values have different names."""
    return CollectiveError(
        f"mean: the ranks gave values of different names; rank {rank} gave {', '.join(map(repr, names))}.",
        fix="Give the same names on every rank, with weight=0 where a rank has nothing.",
    )


def _sum(products: Iterable[float]) -> float:
    """Rounded once; inf and nan as addition has them, which :func:`math.fsum` refuses for inf - inf."""
    numbers = list(products)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)

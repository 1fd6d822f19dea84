"""What ``--per-worker-batch`` accepts: a global batch that grows with the workers, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hora.verify.evidence import Pair, growth
from hora.verify.report import Found

__all__ = ["accept"]

_RATE = 1e-6
"""Learning rates are computed in float64 by the script, or in float32 where they are tensors."""


def accept(pair: Pair, causes: Sequence[Found]) -> tuple[str, list[Found]]:
    """What is accepted of the causes, in words, and the other causes; empty where nothing is.

    Accepted are samples that are as many times those of one worker as there are workers, none of them twice
    in a step, and with them a learning rate that was multiplied by that number, by its root, or not at all.
    Every other difference, such as a rate that is scaled twice, stays a cause.

    Args:
        pair: the runs without any change.
        causes: found by experiments.
    """
    names = {found.name for found in causes}
    if "samples" not in names or not _is_batch_per_worker(pair):
        return "", list(causes)
    taken = {"samples"}
    rate = f"{pair.many.workers} times its learning rate"
    if "learning-rate" in names:
        rule = _rule(pair)
        if rule:
            taken.add("learning-rate")
        rate = rule or "a learning rate in proportion"
    words = f"on the same samples, with {pair.many.workers} times the batch and {rate}"
    return words, [found for found in causes if found.name not in taken]


def _is_batch_per_worker(pair: Pair) -> bool:
    steps = range(min(len(pair.one.steps), len(pair.many.steps)))
    once = all(len(set(samples)) == len(samples) for samples in map(pair.many.samples, steps))
    return once and math.isclose(growth(pair), pair.many.workers)


def _rule(pair: Pair) -> str:
    """How the learning rate depends on the workers in all steps; empty where it does otherwise."""
    workers = pair.many.workers
    pairs = [
        (one, many)
        for (mine, *_), (theirs, *_) in zip(pair.one.steps, pair.many.steps, strict=False)
        for one, many in zip(mine.rates, theirs.rates, strict=True)
    ]
    for factor, words in (
        (1.0, "its learning rate, not scaled"),
        (math.sqrt(workers), f"its learning rate times the root of {workers}"),
    ):
        if all(math.isclose(one * factor, many, rel_tol=_RATE) for one, many in pairs):
            return words
    return ""

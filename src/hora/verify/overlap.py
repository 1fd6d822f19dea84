"""Runs that agree although workers did the same work twice."""

from __future__ import annotations

import collections

from hora.verify.causes import CAUSES
from hora.verify.evidence import Pair
from hora.verify.fixes import fix_of
from hora.verify.report import Found

__all__ = ["overlap"]


def overlap(pair: Pair) -> Found | None:
    """A finding where several ranks used the same samples, at least half of a step's, and one worker did not.

    Their average is then the gradient of one worker's batch, so that nothing else shows it.
    """
    for number, (one, many) in enumerate(zip(pair.one.steps, pair.many.steps, strict=False)):
        ranks = [{sample for batch in rank.batches for sample in batch.samples} for rank in many]
        users = collections.Counter(sample for samples in ranks for sample in samples)
        shared = sum(count > 1 for count in users.values())
        mine = [sample for batch in one[0].batches for sample in batch.samples]
        if users and shared * 2 >= len(users) and len(mine) == len(set(mine)):
            cause = next(cause for cause in CAUSES if cause.name == "samples")
            why = (
                f"Workers use the same samples: {shared} of the {len(users)} samples of step {number + 1} "
                f"are used by several workers, so that {pair.many.workers} workers do the work of fewer."
            )
            return Found(
                name=cause.name, title=cause.title, why=why, fix=fix_of(cause.name, cause.fix, pair.one)
            )
    return None

"""Who waits for whom at this moment, in a sentence: for a job that is ended before a verdict was due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hora.guard.judge import ranks_text

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["waits"]

WORTH = 1.0
"""Seconds of waiting that are worth a word: the ranks of a busy host wait for each other all the time."""


def waits(judge: Judge, now: float) -> str:
    """The longest wait; empty when no rank has waited for a second.

    Args:
        judge: knows the calls.
        now: ``time.monotonic()``.
    """
    judge.places.look()
    places: dict[tuple[int, int], list[int]] = {}
    for rank, at in judge.calls.waiting().items():
        places.setdefault(at, []).append(rank)
    heads = judge.places.heads
    since = {at: min(heads[rank].since for rank in ranks) for at, ranks in places.items()}
    place = min(since, key=lambda one: since[one], default=None)
    if place is None or now - since[place] < WORTH:
        return ""
    ranks, missing = places[place], judge.places.missing(*place)
    call = judge.calls.call(ranks[0], judge.places.entry(ranks[0], *place))
    text = f"{ranks_text(ranks).capitalize()} had been waiting for {now - since[place]:.0f} s in {call.site}"
    if not missing:
        return f"{text}, which all its ranks had entered."
    return f"{text}, and {ranks_text(missing)} had not come."

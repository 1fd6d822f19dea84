"""The ranks ask for the same, before the engine starts anything.

The engines of TensorFlow and JAX crash, hang or can do nothing more when ranks give them tensors of different
shapes. So each kind of call is compared the first time that it occurs and trusted afterwards: by the
supervisor when there is a guard, else through the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hora.adapter.context import Context
from hora.adapter.frames import at
from hora.adapter.guard import Members, Place, Shaped, collective, describe, in_words
from hora.adapter.ops import refuse_presentation
from hora.core.errors import CollectiveError, HoraError
from hora.core.plural import plural
from hora.guard.call import Call, difference

__all__ = ["agree", "digest", "first_difference", "require_same", "rows"]


def agree(
    context: Context,
    kind: str,
    name: str | None = None,
    tensors: Sequence[Shaped] = (),
    process_set: Members | None = None,
    **details: Any,
) -> Place | None:
    """All members of the process set are about to make this call, or an error says what differs.

    Args:
        context: the job.
        kind: which collective: ``allreduce``, ``grouped_allreduce``, ``allgather``, ...
        name: the name that the user gave it.
        tensors: those that all ranks must give alike, or their :class:`hora.adapter.guard.Spec`. Of
            ``allgather`` and ``alltoall`` the first dimensions may differ.
        process_set: who takes part; None: all ranks.
        details: what else must be equal: ``operation``, ``root``, ``factors``, ``items``; hashable.

    Returns:
        The call's place for ``context.waiting(place)``, in which the engine's work belongs; None without a
        guard.

    Raises:
        CollectiveError: without a guard, on all ranks: they do not call the same.
        VerdictError: with one: the same; or the job is to stop for another reason.
        WorldError: a rank does not come in time, or has ended.
    """
    refuse_presentation()
    members = context.everyone if process_set is None else process_set
    if context.guard is not None:
        return context.guard.enter(kind, tensors, process_set=members, label=name, **details)
    if len(members.members) == 1:
        return None
    rows = kind in ("allgather", "grouped_allgather", "alltoall")
    shapes = tuple([(one.dtype, tuple(one.shape)[1:] if rows else tuple(one.shape)) for one in tensors])
    number = members.process_set_id or 0
    key = (kind, name, number, shapes, *details.items())
    if key not in context.agreed:
        signature = describe(kind, shapes, label=name, process_set=members, details=details)
        text = in_words(signature, details, members)
        _compare(context, Call(signature, text, at()[0]), process_set=members)
        context.agreed[key] = number
    return None


def rows(
    context: Context, counts: Sequence[int], process_set: Members | None = None, *, what: str = "rows"
) -> list[list[int]]:
    """Each member's numbers, in the order of ranks: first dimensions for an allgather, or alltoall's splits.

    Args:
        context: the job.
        counts: this rank's; as many on each.
        process_set: who takes part; None: all ranks.
        what: they are, for errors.

    Raises:
        WorldError: a rank does not come in time, or has ended.
    """
    told = context.exchange(
        what, json.dumps([int(count) for count in counts]).encode(), process_set=process_set
    )
    return [json.loads(text) for text in told]


def require_same(
    items: Sequence[str],
    context: Context,
    *,
    function: str,
    what: str,
    fix: str,
    error: type[HoraError],
    process_set: Members | None = None,
) -> None:
    """Raise ``error`` on every rank, naming the first difference, unless all ranks give the same items.

    Args:
        items: descriptions, one per tensor.
        context: the job.
        function: who asks, for the guard.
        what: what the items are, as the subject of the message ("The parameters").
        fix: what to write instead.
        error: the class to raise.
        process_set: the ranks that compare; None: all.
    """
    ranks = (context.everyone if process_set is None else process_set).members
    if len(ranks) == 1:
        return
    with collective(context, function, process_set=process_set, items=tuple(items)):
        digests = context.exchange(function, digest(items), process_set=process_set)
        if all(other == digests[0] for other in digests):
            return
        told = context.exchange(
            f"items of {function}", json.dumps(list(items)).encode(), process_set=process_set
        )
    difference = first_difference(ranks, [json.loads(text) for text in told])
    raise error(f"{what} differ between ranks: {difference}.", fix=fix)


def digest(items: Sequence[str]) -> bytes:
    """16 bytes, equal for equal lists."""
    return hashlib.blake2b("\n".join(items).encode(), digest_size=16).digest()


def first_difference(ranks: Sequence[int], lists: Sequence[Sequence[str]]) -> str:
    """Where the list of some rank first differs from that of the first, in words; at least one must.

    Args:
        ranks: whose lists they are.
        lists: one per rank.
    """
    rank, other = next(pair for pair in zip(ranks, lists, strict=True) if pair[1] != lists[0])
    pairs = enumerate(zip(lists[0], other, strict=False))
    place = next((index for index, (first, second) in pairs if first != second), None)
    if place is None:
        return f"rank {ranks[0]} has {len(lists[0])} of them and rank {rank} has {len(other)}"
    return f"number {place} is {lists[0][place]} on rank {ranks[0]} and {other[place]} on rank {rank}"


def _compare(context: Context, call: Call, *, process_set: Members) -> None:
    number = process_set.process_set_id or 0
    order = sum(at_set == number for at_set in context.agreed.values())
    mine = json.dumps({"signature": call.signature, "text": call.text, "where": call.where}, default=str)
    told = context.exchange(f"agreement {order}", mine.encode(), process_set=process_set)
    calls = [Call(**json.loads(text)) for text in told]
    groups: dict[str, list[int]] = {}
    for place, other in enumerate(calls):
        groups.setdefault(other.key, []).append(place)
    if len(groups) == 1:
        return
    parts = []
    for places in groups.values():
        ranks = [process_set.members[place] for place in places]
        verb = "calls" if len(ranks) == 1 else "call"
        named = ", ".join(map(str, ranks))
        parts.append(f"{plural(len(ranks), 'rank')} {named} {verb} {calls[places[0]].site}")
    differing = [calls[places[0]] for places in groups.values()]
    raise CollectiveError(
        f"The ranks do not call the same: {'; '.join(parts)}. {difference(differing)}",
        fix="Make the same call on every rank, in the same order, with equal arguments.",
    )

"""Do all ranks hold the same list? Cheap when they do, exact about the first difference when not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.adapter.agreement import digest, first_difference
from hora.adapter.guard import collective
from hora.core.errors import HoraError
from hora.torch._context import Context
from hora.torch._objects import gather_objects
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch._wire import start_gather, wait_for

__all__ = ["require_same"]


def require_same(
    items: Sequence[str],
    context: Context,
    *,
    function: str,
    what: str,
    fix: str,
    error: type[HoraError],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise ``error`` on every rank, naming the first difference, unless all ranks give the same items.

    Args:
        items: descriptions, one per tensor.
        context: the job.
        function: who asks, for the guard.
        what: what the items are, as the subject of the message ("The parameters").
        fix: what to write instead.
        error: the class to raise.
        process_set: the ranks that compare.
    """
    ranks = process_set.members
    if len(ranks) == 1:
        return
    mine = torch.frombuffer(bytearray(digest(items)), dtype=torch.int64).to(context.control)
    everyone = mine.new_empty(len(ranks) * 2)
    with collective(context, function, process_set=process_set, items=tuple(items)):
        context.presence.call(None, process_set)
        wait_for(start_gather(everyone, mine, process_set.group), mine, process_set.group)
    if bool((everyone.view(-1, 2) == everyone[:2]).all()):
        return
    lists = gather_objects(list(items), context, process_set=process_set)
    difference = first_difference(ranks, lists)
    raise error(f"{what} differ between ranks: {difference}.", fix=fix)

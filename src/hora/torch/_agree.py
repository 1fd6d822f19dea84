"""Do all ranks hold the same list? Cheap when they do, exact about the first difference when not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hora.core.errors import HoraError
from hora.torch._context import Context
from hora.torch._objects import gather_objects
from hora.torch._wire import gather_flat

__all__ = ["require_same"]


def require_same(
    items: Sequence[str], context: Context, *, what: str, fix: str, error: type[HoraError]
) -> None:
    """Raise ``error`` on every rank, naming the first difference, unless all ranks give the same items.

    Args:
        items: descriptions, one per tensor.
        context: the job.
        what: what the items are, as the subject of the message ("The parameters").
        fix: what to write instead.
        error: the class to raise.
    """
    if context.world.size == 1:
        return
    digest = hashlib.blake2b("\n".join(items).encode(), digest_size=16).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(context.control)
    everyone = mine.new_empty(context.world.size * 2)
    gather_flat(everyone, mine, context.group)
    if bool((everyone.view(-1, 2) == everyone[:2]).all()):
        return
    lists = gather_objects(list(items), context)
    for rank, other in enumerate(lists):
        if other == lists[0]:
            continue
        pairs = enumerate(zip(lists[0], other, strict=False))
        place = next((index for index, (first, second) in pairs if first != second), None)
        if place is None:
            difference = f"rank 0 has {len(lists[0])} of them and rank {rank} has {len(other)}"
        else:
            difference = f"number {place} is {lists[0][place]} on rank 0 and {other[place]} on rank {rank}"
        raise error(f"{what} differ between ranks: {difference}.", fix=fix)

"""What collectives do, whichever framework's tensors they move."""

from __future__ import annotations

import enum

from hora.core.errors import CollectiveError
from hora.core.presentation import is_presenting

__all__ = ["Kind", "ReduceOp", "refuse_presentation"]


class ReduceOp(enum.Enum):
    """How ``allreduce`` and ``reducescatter`` combine the ranks' tensors."""

    Average = "average"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "product"


class Kind(enum.Enum):
    """Which collective."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"


def refuse_presentation() -> None:
    """Raises CollectiveError inside code that shows something, which lives on one rank."""
    if is_presenting():
        raise CollectiveError(
            "A collective was called while something is shown, which only rank 0 does: it would wait for "
            "the other ranks.",
            fix="Reduce the value first, on every rank: loss = hora.mean(loss), and show the number.",
        )

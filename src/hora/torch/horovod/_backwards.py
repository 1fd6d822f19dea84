"""Helpers of Horovod that scripts import from its private corners."""

from __future__ import annotations

from hora.adapter.ops import ReduceOp
from hora.torch._arguments import operation
from hora.torch.horovod._operations import by_number

__all__ = ["handle_average_backwards_compatibility", "num_rank_is_power_2"]


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operation that the arguments ``op`` and ``average`` mean together.

    Raises:
        ValueError: both are given.
    """
    return operation(average, by_number(op), function="allreduce")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0

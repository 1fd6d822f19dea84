"""Checks of what a collective is given, in whichever framework, each with the line to write instead."""

from __future__ import annotations

import warnings

from hora.adapter.context import Common
from hora.adapter.guard import Members
from hora.adapter.ops import ReduceOp
from hora.core.errors import CollectiveError

__all__ = ["check_average", "check_root", "operation"]


def operation(
    average: bool | None,
    op: ReduceOp | None,
    *,
    function: str,
    alias: str = "hora",
    stacklevel: int = 3,
) -> ReduceOp:
    """The operation that Horovod's two arguments ask for: ``op``, or the older ``average``.

    Args:
        average: True or False, deprecated.
        op: the operation; not both.
        function: for messages.
        alias: what scripts call the module, for messages.
        stacklevel: of the warning: 3 when a public function calls this.

    Raises:
        CollectiveError: both are given, or something else.
    """
    if average is not None and op is not None:
        raise CollectiveError(
            f"{function} got both average={average!r} and op={op!r}.", fix="Keep op= and leave average out."
        )
    if op is not None:
        if not isinstance(op, ReduceOp):
            raise CollectiveError(f"{op!r} is not a reduce operation.", fix="Write op=hora.Sum, for example.")
        return op
    if average is None:
        return ReduceOp.Average
    if not isinstance(average, bool):
        raise CollectiveError(
            f"{function}: average={average!r} is neither True nor False.",
            fix="Write op=hora.Sum, for example.",
        )
    warnings.warn(
        f"{function}: average= is deprecated; write op={alias}.{'Average' if average else 'Sum'}.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return ReduceOp.Average if average else ReduceOp.Sum


def check_average(op: ReduceOp, dtype: str, *, floating: bool, cast: str, function: str) -> None:
    """Raise CollectiveError for a dtype of which ``op`` has no meaning.

    Args:
        op: the operation.
        dtype: its name; ``bool`` is that of truth values.
        floating: whether it has fractions.
        cast: the method of a tensor that makes fractions: ``tensor.float()``.
        function: for messages.
    """
    if dtype == "bool" and op in (ReduceOp.Average, ReduceOp.Sum):
        raise CollectiveError(
            f"{function} has no {op.name} of bool tensors.",
            fix="Write op=hora.Max for any, op=hora.Min for all, or convert to integers to count.",
        )
    if op is ReduceOp.Average and not floating:
        raise CollectiveError(
            f"{function} has no Average of {dtype} tensors: the result would be truncated.",
            fix=f"Write op=hora.Sum, or {cast} for a fractional average.",
        )


def check_root(
    root_rank: object, context: Common, *, function: str, process_set: Members | None = None
) -> None:
    """Raise CollectiveError unless ``root_rank`` is a rank of the job, and of the process set."""
    size = context.world.size
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise CollectiveError(
            f"{function}: root_rank={root_rank!r} is not a rank of this job (0 to {size - 1}).",
            fix=f"Write {function}(..., root_rank=0), or another rank below {size}.",
        )
    if process_set is not None and root_rank not in process_set.members:
        raise CollectiveError(
            f"{function}: root_rank={root_rank} is not in {process_set}.",
            fix=f"Give the rank in the whole job of a member, such as {process_set.members[0]}.",
        )

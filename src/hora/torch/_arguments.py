"""Checks of what a collective is given, each with the line to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hora.adapter import arguments
from hora.adapter.ops import ReduceOp
from hora.core.errors import CollectiveError
from hora.torch._adasum import check_adasum
from hora.torch._context import Context
from hora.torch._dtypes import REDUCED_IN
from hora.torch._process_sets import ProcessSet
from hora.torch._request import dispatcher

__all__ = [
    "check_group",
    "check_reduction",
    "check_splits",
    "check_tensor",
    "operation",
]


def operation(average: bool | None, op: ReduceOp | None, *, function: str) -> ReduceOp:
    """The operation that Horovod's two arguments ask for: ``op``, or the older ``average``."""
    as_horovod = dispatcher().as_horovod  # its forms are wrapped once more
    return arguments.operation(
        average,
        op,
        function=function,
        alias="hvd" if as_horovod else "hora",
        stacklevel=6 if as_horovod else 5,
    )


def check_tensor(tensor: object, context: Context, *, function: str) -> None:
    """Raise CollectiveError unless ``tensor`` is dense and on a device that an engine reaches."""
    if not isinstance(tensor, torch.Tensor):
        raise CollectiveError(
            f"{function} takes a tensor, not {type(tensor).__name__}.",
            fix="Write torch.as_tensor(value), or use hora.mean(value) or hora.broadcast_object(value).",
        )
    if tensor.layout != torch.strided:
        raise CollectiveError(
            f"{function} takes dense tensors, not {tensor.layout}.",
            fix="Write tensor.to_dense() first, or use hora.sparse_allreduce_async.",
        )
    if tensor.device.type not in context.devices:
        able = " and ".join(sorted(context.devices))
        raise CollectiveError(
            f"{function} got a tensor on {tensor.device}, but the ranks exchange tensors on {able} only.",
            fix=f"Write tensor.to({str(context.device)!r})."
            if context.device.type in context.devices
            else f"Write tensor.to({min(context.devices)!r}).",
        )


def check_group(tensors: object, context: Context, *, function: str) -> list[torch.Tensor]:
    """The tensors of a group, as a list."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or not tensors:
        raise CollectiveError(
            f"{function} takes a list of one or more tensors, not "
            + (
                f"an empty {type(tensors).__name__}."
                if isinstance(tensors, Sequence) and not tensors
                else f"{type(tensors).__name__}."
            ),
            fix=f"Write {function}([tensor, ...]).",
        )
    for tensor in tensors:
        check_tensor(tensor, context, function=function)
    return list(tensors)


def check_reduction(
    tensors: Sequence[torch.Tensor], op: ReduceOp, process_set: ProcessSet, *, function: str
) -> None:
    """Raise CollectiveError for a dtype that ``op`` has no meaning for."""
    for dtype in {tensor.dtype for tensor in tensors}:
        name = str(dtype).removeprefix("torch.")
        if dtype not in REDUCED_IN:
            raise CollectiveError(
                f"{function} does not take {name} tensors.",
                fix="Convert first: tensor.float(), or torch.view_as_real(tensor) for complex numbers.",
            )
        if op is ReduceOp.Adasum:
            check_adasum(dtype, len(process_set.members), function=function)
        if dispatcher().as_horovod:
            continue
        if dtype is torch.bool and op in (ReduceOp.Average, ReduceOp.Sum):
            raise CollectiveError(
                f"{function} has no {op.name} of bool tensors.",
                fix="Write op=hora.Max for any, op=hora.Min for all, or tensor.int() to count.",
            )
        if op is ReduceOp.Average and not dtype.is_floating_point:
            raise CollectiveError(
                f"{function} has no Average of {name} tensors: the result would be truncated.",
                fix="Write op=hora.Sum, or tensor.float() for a fractional average.",
            )


def check_splits(
    tensor: torch.Tensor, splits: Any, process_set: ProcessSet, *, function: str
) -> torch.Tensor | None:
    """The splits as a vector of integers on the CPU; None splits evenly."""
    size = len(process_set.members)
    if tensor.dim() == 0:
        raise CollectiveError(
            f"{function} splits along the first dimension, but the tensor has none.",
            fix="Write tensor.reshape(1), or use hora.allgather.",
        )
    if splits is None:
        if tensor.shape[0] % size:
            raise CollectiveError(
                f"{function}: {tensor.shape[0]} rows do not divide among {size} ranks.",
                fix=f"Give splits=[...], {size} numbers of rows that sum to {tensor.shape[0]}.",
            )
        return None
    rows = torch.as_tensor(splits).detach().cpu()
    if rows.is_floating_point() or rows.dtype is torch.bool or rows.dim() != 1 or rows.numel() != size:
        raise CollectiveError(
            f"{function}: splits={splits!r} are not {size} whole numbers.",
            fix="Give one number of rows for each rank of the process set.",
        )
    if bool((rows < 0).any()) or int(rows.sum()) != tensor.shape[0]:
        raise CollectiveError(
            f"{function}: splits={rows.tolist()} do not sum to the {tensor.shape[0]} rows of the tensor.",
            fix="Let the numbers be 0 or more and sum to tensor.shape[0].",
        )
    return rows.to(torch.int64)

"""Collectives: the same call on every rank, one result from all of their tensors.

They return new tensors, leave their inputs alone and take any memory layout. Every rank must make
the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hora.core.errors import CollectiveError
from hora.torch._context import Context, required

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
]


class ReduceOp(enum.Enum):
    """How ``allreduce`` combines the ranks' tensors."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

_ENGINE_OP = {
    Average: dist.ReduceOp.SUM,  # divided afterwards: Gloo has no average
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}

# dtype -> dtype in which it is reduced. Half precision is reduced in float32 and rounded once; the
# engines have no int16; bool follows as 0 and 1.
_REDUCED_IN = {
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

_MAX_DIMENSIONS = 16
"""Dimensions of a tensor that ``allgather`` describes to the other ranks; torch's own limit is 64."""


def allreduce(tensor: torch.Tensor, op: ReduceOp = Average, *, name: str | None = None) -> torch.Tensor:
    """Combine the tensors of all ranks element by element.

    Args:
        tensor: the same shape and dtype on every rank; bool, an integer of up to 64 bits, or floating.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. Integers have no ``Average``; bool has
            ``Min`` (all), ``Max`` (any) and ``Product`` (all).
        name: appears in the timeline.

    Returns:
        A new tensor, equal on all ranks, detached from autograd.

    Raises:
        CollectiveError: a dtype, device or operation that cannot be reduced.
    """
    context = required("allreduce")
    _check_tensor(tensor, context, function="allreduce")
    _check_operation(tensor.dtype, op)
    wire = tensor.detach().to(_REDUCED_IN[tensor.dtype], memory_format=torch.contiguous_format, copy=True)
    if context.world.size > 1 and wire.numel() > 0:
        with _span(context, "allreduce", wire, name):
            dist.all_reduce(wire, _ENGINE_OP[op], group=context.group)
        if op is Average:
            wire /= context.world.size
    return wire.to(tensor.dtype)


def allgather(tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in the order of ranks.

    Args:
        tensor: any dtype. The first dimension may differ between ranks (0 too); the others and the
            dtype may not. A tensor without dimensions counts as one of shape ``(1,)``.
        name: appears in the timeline.

    Raises:
        CollectiveError: on every rank, when dtypes or other dimensions differ.
    """
    context = required("allgather")
    _check_tensor(tensor, context, function="allgather")
    local = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if context.world.size == 1:
        return local.clone(memory_format=torch.contiguous_format)
    with _span(context, "allgather", local, name):
        lengths = _agree_on_shapes(local, context)
        wire = _as_bytes(local)
        per_row = local.element_size() * math.prod(local.shape[1:])
        parts = gather_bytes(wire, [length * per_row for length in lengths], context)
    return torch.cat(parts).view(local.dtype).reshape(sum(lengths), *local.shape[1:])


def broadcast(tensor: torch.Tensor, root_rank: int = 0, *, name: str | None = None) -> torch.Tensor:
    """The tensor of ``root_rank``, on every rank.

    Args:
        tensor: the same shape and dtype on every rank; any dtype.
        root_rank: whose values all ranks get.
        name: appears in the timeline.

    Raises:
        CollectiveError: ``root_rank`` is not a rank of this job, or the device has no engine.
    """
    context = required("broadcast")
    _check_tensor(tensor, context, function="broadcast")
    check_root(root_rank, context, function="broadcast")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if context.world.size > 1 and result.numel() > 0:
        with _span(context, "broadcast", result, name):
            dist.broadcast(_as_bytes(result), root_rank, group=context.group)
    return result


def barrier() -> None:
    """Wait until every rank has come here."""
    context = required("barrier")
    token = torch.zeros(1, dtype=torch.int32, device=context.control)
    with _span(context, "barrier", token, None):
        dist.all_reduce(token, group=context.group)
        token.item()  # on a GPU the call above only enqueues


def gather_bytes(wire: torch.Tensor, lengths: Sequence[int], context: Context) -> list[torch.Tensor]:
    """All ranks' byte vectors, whose lengths every rank knows. Engines want equal lengths, so pad."""
    longest = max(lengths)
    if longest == 0:
        return [wire.new_empty(0) for _ in lengths]
    if wire.numel() < longest:
        wire = torch.cat([wire, wire.new_zeros(longest - wire.numel())])
    flat = wire.new_empty(longest * len(lengths))
    gather_flat(flat, wire, context)
    return [row[:length] for row, length in zip(flat.view(len(lengths), longest), lengths, strict=True)]


def gather_flat(output: torch.Tensor, wire: torch.Tensor, context: Context) -> None:
    """Fill the vector ``output`` with all ranks' vectors ``wire``, which are of one length."""
    _all_gather(output, wire, group=context.group)


# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def check_root(root_rank: int, context: Context, *, function: str) -> None:
    """Raise CollectiveError unless ``root_rank`` is a rank of the job."""
    size = context.world.size
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise CollectiveError(
            f"{function}: root_rank={root_rank!r} is not a rank of this job (0 to {size - 1}).",
            fix=f"Write {function}(..., root_rank=0), or another rank below {size}.",
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a byte vector, so that every dtype travels alike (copied if not contiguous)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _agree_on_shapes(local: torch.Tensor, context: Context) -> list[int]:
    """Every rank's first dimension; the same CollectiveError on all ranks if the rest differs."""
    header = torch.full((_MAX_DIMENSIONS + 2,), -1, dtype=torch.int64)
    header[0] = _DTYPES.index(local.dtype) if local.dtype in _DTYPES else -1
    header[1] = local.dim()
    sizes = local.shape[:_MAX_DIMENSIONS]
    header[2 : 2 + len(sizes)] = torch.tensor(sizes)
    headers = header.new_empty(context.world.size * header.numel()).to(context.control)
    gather_flat(headers, header.to(context.control), context)
    rows: list[list[int]] = headers.view(context.world.size, -1).tolist()
    for rank, row in enumerate(rows):
        if row[1] > _MAX_DIMENSIONS:
            raise CollectiveError(
                f"allgather: the tensor of rank {rank} has {row[1]} dimensions, more than {_MAX_DIMENSIONS}.",
                fix="Join some of them first: tensor.flatten(1).",
            )
        if row[:2] + row[3:] != rows[0][:2] + rows[0][3:]:
            raise CollectiveError(
                f"allgather: rank 0 gave {_describe(rows[0])}, but rank {rank} gave {_describe(row)}. "
                "Only the first dimension may differ.",
                fix="Give the same dtype and the same other dimensions on every rank.",
            )
    return [row[2] for row in rows]


_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def _describe(row: Sequence[int]) -> str:
    dtype = str(_DTYPES[row[0]]).removeprefix("torch.") if row[0] >= 0 else "unknown"
    return f"{dtype} of shape {tuple(row[2 : 2 + row[1]])}"


def _check_tensor(tensor: torch.Tensor, context: Context, *, function: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CollectiveError(
            f"{function} takes a tensor, not {type(tensor).__name__}.",
            fix="Write torch.as_tensor(value), or use hora.mean(value) or hora.broadcast_object(value).",
        )
    if tensor.layout != torch.strided:
        raise CollectiveError(
            f"{function} takes dense tensors, not {tensor.layout}.", fix="Write tensor.to_dense() first."
        )
    if tensor.device.type not in context.devices:
        able = " and ".join(sorted(context.devices))
        raise CollectiveError(
            f"{function} got a tensor on {tensor.device}, but the ranks exchange tensors on {able} only.",
            fix=f"Write tensor.to({str(context.device)!r})."
            if context.device.type in context.devices
            else f"Write tensor.to({min(context.devices)!r}).",
        )


def _check_operation(dtype: torch.dtype, op: ReduceOp) -> None:
    if not isinstance(op, ReduceOp):
        raise CollectiveError(f"{op!r} is not a reduce operation.", fix="Write op=hora.Sum, for example.")
    name = str(dtype).removeprefix("torch.")
    if dtype not in _REDUCED_IN:
        raise CollectiveError(
            f"allreduce does not take {name} tensors.",
            fix="Convert first: tensor.float(), or torch.view_as_real(tensor) for complex numbers.",
        )
    if dtype is torch.bool and op in (Average, Sum):
        raise CollectiveError(
            f"allreduce has no {op.name} of bool tensors.",
            fix="Write op=hora.Max for any, op=hora.Min for all, or tensor.int() to count.",
        )
    if op is Average and not dtype.is_floating_point:
        raise CollectiveError(
            f"allreduce has no Average of {name} tensors: the result would be truncated.",
            fix="Write op=hora.Sum, or tensor.float() for a fractional average.",
        )


@contextlib.contextmanager
def _span(context: Context, kind: str, tensor: torch.Tensor, name: str | None) -> Iterator[None]:
    timeline = context.timeline
    if not timeline.enabled:
        yield
        return
    start = time.time()
    try:
        yield
    finally:
        details = {"bytes": tensor.numel() * tensor.element_size()} | ({"name": name} if name else {})
        timeline.add(kind, start, time.time(), lane="collectives", details=details)

"""Reductions over the ranks: the allreduce family.

The same call on every rank, in the same order; one result from all of their tensors. Inputs may have any
memory layout. Names and arguments are Horovod's.
"""

# ruff: noqa: PLR0917 - scripts written for Horovod pass these arguments by position
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.torch._arguments import check_group, check_reduction, check_tensor, operation
from hora.torch._autograd import run
from hora.torch._compression import Compression, Compressor
from hora.torch._context import required
from hora.torch._handles import Handle, submit
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._request import Request

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "reduction",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks element by element.

    Half precision is reduced in float32 and rounded once. Factors scale integers by way of float64,
    towards zero.

    Args:
        tensor: the same shape and dtype on every rank; bool, an integer of up to 64 bits, or floating.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``.
        name: appears in the timeline.
        compression: how the tensor travels and is added up, such as ``Compression.fp16``.
        op: ``Average`` (if left out), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. Integers have no
            ``Average`` or ``Adasum``; bool has ``Min`` (all), ``Max`` (any) and ``Product`` (all).
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; only they call.

    Returns:
        A new tensor, equal on all ranks, with a gradient if ``tensor`` has one.

    Raises:
        CollectiveError: a dtype, device, operation or process set that this cannot take.
    """
    packed, context = compression.compress(_checked(tensor, "allreduce"))
    request = _request(
        [packed],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="allreduce",
        narrow=packed.dtype is not tensor.dtype,
    )
    result: torch.Tensor = compression.decompress(run(request), context)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an :func:`allreduce`; ``synchronize`` gives its result, without a gradient.

    The tensor must not change before.
    """
    _checked(tensor, "allreduce_async")
    return submit(
        _request(
            [tensor],
            average,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            function="allreduce_async",
        )
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`allreduce`, but the result overwrites the tensor, outside of autograd; returns the tensor."""
    _checked(tensor, "allreduce_")
    request = _request(
        [tensor],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="allreduce_",
        in_place=True,
    )
    submit(request)()
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an :func:`allreduce_`; until ``synchronize`` returns, the tensor must be left alone."""
    _checked(tensor, "allreduce_async_")
    request = _request(
        [tensor],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="allreduce_async_",
        in_place=True,
    )
    return submit(request, lambda _: tensor)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors in one message for each dtype; a list of the results."""
    given = check_group(tensors, required("grouped_allreduce"), function="grouped_allreduce")
    packed = [compression.compress(tensor) for tensor in given]
    request = _request(
        [tensor for tensor, _ in packed],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="grouped_allreduce",
        grouped=True,
        narrow=any(small.dtype is not tensor.dtype for (small, _), tensor in zip(packed, given, strict=True)),
    )
    results = run(request)
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a :func:`grouped_allreduce`; ``synchronize`` gives the list, without gradients."""
    given = check_group(tensors, required("grouped_allreduce_async"), function="grouped_allreduce_async")
    return submit(
        _request(
            given,
            average,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            function="grouped_allreduce_async",
            grouped=True,
        )
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`grouped_allreduce`, but the results overwrite the tensors, outside of autograd."""
    given = check_group(tensors, required("grouped_allreduce_"), function="grouped_allreduce_")
    request = _request(
        given,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="grouped_allreduce_",
        grouped=True,
        in_place=True,
    )
    submit(request)()
    return given


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a :func:`grouped_allreduce_`; until ``synchronize`` returns, the tensors must be left alone."""
    given = check_group(tensors, required("grouped_allreduce_async_"), function="grouped_allreduce_async_")
    request = _request(
        given,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        function="grouped_allreduce_async_",
        grouped=True,
        in_place=True,
    )
    return submit(request, lambda _: given)


def reduction(
    kind: Kind,
    tensors: list[torch.Tensor],
    op: ReduceOp,
    *,
    function: str,
    process_set: ProcessSet,
    **details: Any,
) -> Request:
    """A checked request of a kind that reduces."""
    member_set(process_set, function=function)
    check_reduction(tensors, op, process_set, function=function)
    return Request(kind=kind, tensors=tensors, op=op, process_set=process_set, **details)


def _checked(tensor: torch.Tensor, function: str) -> torch.Tensor:
    check_tensor(tensor, required(function), function=function)
    return tensor


def _request(
    tensors: list[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    function: str,
    grouped: bool = False,
    in_place: bool = False,
    narrow: bool = False,
) -> Request:
    if in_place and len({id(tensor) for tensor in tensors}) < len(tensors):
        raise CollectiveError(
            f"{function} got a tensor twice, which it would overwrite twice.", fix="Give each tensor once."
        )
    return reduction(
        Kind.ALLREDUCE,
        tensors,
        operation(average, op, function=function),
        function=function,
        process_set=process_set,
        name=name,
        prescale=prescale,
        postscale=postscale,
        outputs=tensors if in_place else None,
        grouped=grouped,
        narrow=narrow,
    )

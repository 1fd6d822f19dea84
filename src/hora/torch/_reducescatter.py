"""Reductions of which each rank gets its own rows."""

# ruff: noqa: PLR0917 - scripts written for Horovod pass these arguments by position
from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.torch._arguments import check_group, check_tensor, operation
from hora.torch._autograd import run
from hora.torch._collectives import reduction
from hora.torch._compression import Compression, Compressor
from hora.torch._context import required
from hora.torch._handles import Handle, submit
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch._request import Request

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine the tensors of all ranks element by element; each rank gets some rows of the result.

    The rows are shared in the order of ranks. If they do not divide evenly, the first ranks get one more.

    Args:
        tensor: the same shape, of one dimension or more, and dtype on every rank.
        name: appears in the timeline.
        compression: how the tensor travels, such as ``Compression.fp16``.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``; dtypes as for ``allreduce``.
        process_set: the ranks that take part; only they call.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows, with a gradient if ``tensor`` has one and ``op`` is ``Average`` or ``Sum``.

    Raises:
        CollectiveError: a dtype, device, shape, operation or process set that this cannot take.
    """
    check_tensor(tensor, required("reducescatter"), function="reducescatter")
    packed, context = compression.compress(tensor)
    request = _request(
        [packed], name, op, process_set, prescale_factor, postscale_factor, function="reducescatter"
    )
    result: torch.Tensor = compression.decompress(run(request), context)
    return result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a :func:`reducescatter`; ``synchronize`` gives its result, without a gradient."""
    check_tensor(tensor, required("reducescatter_async"), function="reducescatter_async")
    return submit(
        _request(
            [tensor],
            name,
            op,
            process_set,
            prescale_factor,
            postscale_factor,
            function="reducescatter_async",
        )
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors in one message; a list of this rank's rows of each."""
    given = check_group(tensors, required("grouped_reducescatter"), function="grouped_reducescatter")
    packed = [compression.compress(tensor) for tensor in given]
    request = _request(
        [tensor for tensor, _ in packed],
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        function="grouped_reducescatter",
        grouped=True,
    )
    results = run(request)
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a :func:`grouped_reducescatter`; ``synchronize`` gives the list, without gradients."""
    function = "grouped_reducescatter_async"
    given = check_group(tensors, required(function), function=function)
    return submit(
        _request(
            given, name, op, process_set, prescale_factor, postscale_factor, function=function, grouped=True
        )
    )


def _request(
    tensors: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    function: str,
    grouped: bool = False,
) -> Request:
    op = operation(None, op, function=function)
    if op is ReduceOp.Adasum:
        raise CollectiveError(f"{function} has no Adasum.", fix="Write op=hora.Sum, or use hora.allreduce.")
    for tensor in tensors:
        if tensor.dim() == 0:
            raise CollectiveError(
                f"{function} shares out rows, but the tensor has no dimensions.",
                fix="Write tensor.reshape(1), or use hora.allreduce.",
            )
    return reduction(
        Kind.REDUCESCATTER,
        tensors,
        op,
        function=function,
        process_set=process_set,
        name=name,
        prescale=prescale,
        postscale=postscale,
        grouped=grouped,
    )

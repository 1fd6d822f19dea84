"""Allreduce of sparse tensors."""

from __future__ import annotations

from typing import Any

import torch

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.torch._context import required
from hora.torch._handles import Handle
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._request import Request, dispatcher

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a reduction of sparse tensors by gathering the elements of all ranks.

    Args:
        tensor: a ``torch.sparse_coo`` tensor, coalesced or not, of the same shape on every rank; the number
            of elements may differ.
        name: appears in the timeline.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part; only they call.

    Returns:
        A handle; ``synchronize(handle)``, or ``handle()``, gives the coalesced sparse result.

    Raises:
        CollectiveError: a tensor that is not sparse, or another operation.
    """
    function = "sparse_allreduce_async"
    context = required(function)
    member_set(process_set, function=function)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CollectiveError(
            f"{function} takes a torch.sparse_coo tensor, not {what}.", fix="Use hora.allreduce_async."
        )
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise CollectiveError(
            f"{function} has Average and Sum, not {op!r}.",
            fix="Write op=hora.Sum, or tensor.to_dense() first.",
        )
    if tensor.device.type not in context.devices:
        raise CollectiveError(
            f"{function} got a tensor on {tensor.device}, which no engine reaches.",
            fix=f"Write tensor.to({str(context.device)!r}).",
        )
    tensor = tensor.detach()
    # Not coalesced first: the sum is the same, and it would cost a sort.
    parts = {"indices": tensor._indices().t(), "values": tensor._values()}
    works = [
        dispatcher().submit(
            Request(
                kind=Kind.ALLGATHER,
                name=None if name is None else f"{name}.{part}",
                tensors=[content],
                process_set=process_set,
            )
        )
        for part, content in parts.items()
    ]
    shape, size = tensor.shape, len(process_set.members)

    def finish(results: list[Any]) -> torch.Tensor:
        indices, values = results
        if op is ReduceOp.Average:
            values = (values / size).to(values.dtype)
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True).coalesce()

    return Handle("sparse_allreduce", works, finish)

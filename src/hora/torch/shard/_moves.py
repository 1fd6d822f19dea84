"""How chunks move between ranks: sums to the rank whose chunk it is, and chunks to all ranks.

Both are operations of ``torch.distributed`` that start here and are waited for later. Gloo has them as an
all-reduce of a copy and as a gather into another copy. On Gloo, therefore, each rank sends the others their
rows and adds up its own, in the order of ranks, so that the result has the same bits whichever way they
came; and each rank broadcasts its chunk from where it is.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.torch._rendezvous import engines

__all__ = ["start_gather", "start_scatter"]

# torch 2.13 renamed both, and warns about the old names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_scatter(
    output: torch.Tensor,
    wire: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    timeout: datetime.timedelta | None = None,
) -> Any:
    """Start summing ``wire`` over the ranks; ``output`` gets this rank's row of the sum.

    Gloo gives up after ``timeout``, or after the group's; other engines have one of their own.
    """
    if not _is_gloo(group, wire.device):
        return _reduce_scatter(output, wire, op=dist.ReduceOp.SUM, group=group, async_op=True)
    received = torch.empty_like(wire)
    options = dist.AllToAllOptions()
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timeout
    work = group.alltoall_base(received, wire, [], [], options)
    rows = received.view(group.size(), *output.shape)
    return _Works([work], lambda: _add_up(rows, output))


def start_gather(output: torch.Tensor, wire: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start filling ``output`` with all ranks' ``wire``, which is this rank's part of it."""
    if not _is_gloo(group, wire.device):
        return _all_gather(output, wire, group=group, async_op=True)
    chunks = output.view(group.size(), *wire.shape)
    members = dist.get_process_group_ranks(group)
    return _Works(
        [
            dist.broadcast(chunk, member, group=group, async_op=True)
            for chunk, member in zip(chunks.unbind(), members, strict=True)
        ]
    )


class _Works:
    """Several operations under way, and what remains to be done after them."""

    def __init__(self, works: Sequence[Any], after: Callable[[], None] | None = None) -> None:
        self._works = works
        self._after = after

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for all; RuntimeError if that takes too long."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        after, self._after = self._after, None
        if after is not None:
            after()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait()`` would return at once."""
        return all(work.is_completed() for work in self._works)


def _add_up(rows: torch.Tensor, output: torch.Tensor) -> None:
    with torch.no_grad():
        first, second, *others = rows.unbind()
        torch.add(first, second, out=output)
        for row in others:
            output.add_(row)


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return engines(group).get(device.type) == "gloo"

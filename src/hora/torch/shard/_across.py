"""What one rank cannot know of gradients that lie in parts on all: small messages, one answer for all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hora.adapter.guard import collective
from hora.torch._context import Context
from hora.torch._process_sets import ProcessSet

if TYPE_CHECKING:
    from hora.torch.shard._bucket import ShardBucket
    from hora.torch.shard._flat import Member

__all__ = ["Across"]


class Across:
    """Asks the ranks that share an optimizer.

    Args:
        context: of the job.
        process_set: who shares.

    Attributes:
        buckets: of the optimizer.
    """

    def __init__(self, context: Context, process_set: ProcessSet) -> None:
        self._context = context
        self._process_set = process_set
        self.buckets: list[ShardBucket] = []
        self._norms: dict[float, dict[int, torch.Tensor]] = {}

    def changed(self) -> None:
        """Norms that are known hold no longer."""
        self._norms.clear()

    def norm(self, bucket: ShardBucket, member: Member, order: float) -> torch.Tensor:
        """The norm of a whole gradient; those of all gradients come in one message."""
        known = self._norms.get(order)
        if known is None:
            known = self._norms[order] = self._ask_norms(order)
        return known[id(member)].to(bucket.flat.dtype.to_real())

    def largest(self, value: torch.Tensor) -> None:
        """Replace a number by the largest of all ranks."""
        self._reduce(value, dist.ReduceOp.MAX, "overflow of gradients")

    def add_up(self, values: torch.Tensor, name: str) -> None:
        """Replace numbers by their sums over all ranks."""
        self._reduce(values, dist.ReduceOp.SUM, name)

    def gather(self, bucket: ShardBucket, member: Member) -> torch.Tensor:
        """A whole gradient, on every rank."""
        row = torch.zeros(member.stop - member.start, dtype=bucket.flat.dtype, device=bucket.device)
        start, stop = bucket.bounds(member)
        row[start:stop] = bucket.part(member)
        self._reduce(torch.view_as_real(row) if row.is_complex() else row, dist.ReduceOp.SUM, "full_tensor")
        return row.as_strided(member.parameter.shape, member.stride)

    def _ask_norms(self, order: float) -> dict[int, torch.Tensor]:
        members = list(self._members())
        parts = [bucket.part(member) for bucket, member in members]
        present = [place for place, part in enumerate(parts) if part.numel()]
        wire = torch.zeros(len(members), dtype=torch.float64, device=self._context.control)
        with torch.no_grad():
            if present:
                norms = torch._foreach_norm([parts[place] for place in present], order)
                wire[present] = torch.stack([norm.double() for norm in norms]).to(wire.device)
            if math.isinf(order):
                self._reduce(wire, dist.ReduceOp.MAX, "norms of gradients")
            else:
                wire.pow_(order)
                self._reduce(wire, dist.ReduceOp.SUM, "norms of gradients")
                wire.pow_(1 / order)
        return {id(member): norm for (_, member), norm in zip(members, wire.unbind(), strict=True)}

    def _members(self) -> Iterator[tuple[ShardBucket, Member]]:
        for bucket in self.buckets:
            for member in bucket.flat.members:
                yield bucket, member

    def _reduce(self, wire: torch.Tensor, op: Any, name: str) -> None:
        context, process_set = self._context, self._process_set
        with collective(context, name, [wire], process_set=process_set):
            number = context.presence.call(name, process_set)
            work = dist.all_reduce(wire, op=op, group=process_set.group, async_op=True)
            context.presence.wait(work, wire.device, process_set=process_set, number=number, what=name)

"""How the gradients of one optimizer are reduced: over whom, by what, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hora.core.errors import GradientError
from hora.torch._buckets import Bucket
from hora.torch._compression import Compression, Compressor
from hora.torch._process_sets import ProcessSet
from hora.torch._request import ReduceOp

__all__ = ["GradientCompression", "Rule", "Sent"]


@runtime_checkable
class GradientCompression(Protocol):
    """A compression that keeps an error from step to step, such as ``PowerSGD`` and ``TopK``."""

    def exchange(
        self, gradients: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup
    ) -> None:
        """Overwrite each gradient with (about) the sum of all ranks' gradients of that name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What ``DistributedOptimizer`` was told.

    Attributes:
        process_set: the ranks that take part.
        op: ``Average`` or ``Sum``.
        passes: backward passes before the gradients are reduced, as their mean; 1 reduces after each.
        predivide: divides before the sum, and multiplies after it.
        sparse_as_dense: whether sparse gradients are made dense.
        compression: how gradients travel.
    """

    process_set: ProcessSet
    op: ReduceOp = ReduceOp.Average
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    compression: Compressor | GradientCompression = Compression.none

    def check(self) -> None:
        """Raise GradientError for what cannot be meant."""
        if self.op not in (ReduceOp.Average, ReduceOp.Sum):
            raise GradientError(
                f"DistributedOptimizer reduces gradients by Average or Sum, not by {self.op!r}.",
                fix="Write op=hora.Average, or reduce with hora.allreduce(parameter.grad, op=...) yourself.",
            )
        if not isinstance(self.passes, int) or self.passes < 1:
            raise GradientError(
                f"backward_passes_per_step={self.passes!r} is not a number of 1 or more.",
                fix="Give the number of backward passes between two steps.",
            )
        if not self.predivide > 0 or (self.predivide != 1 and self.op is not ReduceOp.Average):
            raise GradientError(
                f"gradient_predivide_factor={self.predivide!r} goes with op=Average, and is above 0.",
                fix="Leave it out.",
            )

    @property
    def size(self) -> int:
        """Ranks that reduce together: 1 on a rank outside the process set, which keeps its own gradients."""
        return len(self.process_set.members) if self.process_set.included() else 1

    @property
    def once(self) -> bool:
        """Whether reducing a gradient again would change it, so that it is reduced once per step."""
        stateful = isinstance(self.compression, GradientCompression)
        return self.passes > 1 or self.op is ReduceOp.Sum or stateful

    def divisor(self, passes: int) -> float:
        """What each rank's gradients are divided by before they are summed, after so many passes."""
        size = self.size if self.op is ReduceOp.Average else 1
        accumulated = max(passes, 1) if self.passes > 1 else 1
        return (size if self.predivide == 1 else self.predivide) * accumulated

    def send(self, bucket: Bucket) -> Sent:
        """Start summing the bucket over the ranks."""
        if self.size == 1:
            return Sent(None, None, None)
        group = self.process_set.group
        if isinstance(self.compression, GradientCompression):
            return self._exchange(bucket, self.compression, group)
        wire, context = self.compression.compress(bucket.wire)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.asyncOp = True
        work = group.allreduce([wire], options)
        return Sent(work, None if wire is bucket.wire else wire, context)

    def receive(self, bucket: Bucket, sent: Sent) -> None:
        """After the work has ended: the bucket holds the result."""
        if sent.wire is not None and not isinstance(self.compression, GradientCompression):
            bucket.wire.copy_(self.compression.decompress(sent.wire, sent.context))
        if self.predivide != 1:
            # The flags and marks in the bucket only count as zero or not.
            bucket.wire.mul_(self.predivide / self.size)

    def _exchange(self, bucket: Bucket, compression: GradientCompression, group: dist.ProcessGroup) -> Sent:
        tail = bucket.tail.clone()
        dist.all_reduce(tail, group=group)
        bucket.tail.copy_(tail)
        present = tail[: len(bucket.names)].tolist()
        pairs = [
            (gradient, name)
            for gradient, name, flag in zip(bucket.gradients(), bucket.names, present, strict=True)
            if flag
        ]
        if pairs:
            compression.exchange([gradient for gradient, _ in pairs], [name for _, name in pairs], group)
        return Sent(None, None, None)


@dataclass(frozen=True)
class Sent:
    """A bucket on its way: the work, and what travels if it is not the bucket itself."""

    work: Any
    wire: torch.Tensor | None
    context: Any

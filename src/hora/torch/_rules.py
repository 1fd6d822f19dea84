"""How the gradients of one optimizer are reduced: over whom, by what, and how they travel."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.torch._buckets import Bucket
from hora.torch._compression import Compression, Compressor
from hora.torch._process_sets import ProcessSet
from hora.torch.engines import LARGE, Group

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
        op: ``Average``, ``Sum``, or ``Adasum``, which combines the changes of parameters, not gradients.
        passes: backward passes before the gradients are reduced, as their mean; 1 reduces after each.
        predivide: divides before the sum, and multiplies after it.
        sparse_as_dense: whether sparse gradients are made dense.
        compression: how gradients travel.
        apart: whether each rank steps by its own gradients for now, and parameters are averaged now and then.
    """

    process_set: ProcessSet
    op: ReduceOp = ReduceOp.Average
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    compression: Compressor | GradientCompression = Compression.none
    apart: bool = False

    def check(self) -> None:
        """Raise GradientError for what cannot be meant."""
        if self.op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
            raise GradientError(
                f"DistributedOptimizer combines ranks by Average, Sum or Adasum, not by {self.op!r}.",
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
        if self.op is ReduceOp.Adasum and isinstance(self.compression, GradientCompression):
            raise GradientError(
                f"op=hora.Adasum does not go with {type(self.compression).__name__}, which adds up.",
                fix="Write compression=hora.Compression.fp16 or bf16, or leave it out.",
            )

    @property
    def members(self) -> int:
        """Ranks that work together: 1 on a rank outside the process set, which is on its own."""
        return len(self.process_set.members) if self.process_set.included() else 1

    @property
    def size(self) -> int:
        """Ranks that reduce gradients together: 1 where each rank keeps its own, as with Adasum."""
        return 1 if self.op is ReduceOp.Adasum or self.apart else self.members

    @property
    def once(self) -> bool:
        """Whether reducing a gradient again would change it, so that it is reduced once per step."""
        return self.passes > 1 or self.op is ReduceOp.Sum or self.exchanges

    @functools.cached_property  # to ask a protocol takes as long as all else that a bucket needs in Python
    def exchanges(self) -> bool:
        """Whether a compression of its own exchanges the gradients, by collectives that it starts itself."""
        return isinstance(self.compression, GradientCompression)

    def divisor(self, passes: int) -> float:
        """What each rank's gradients are divided by before they are summed, after so many passes."""
        size = self.size if self.op is ReduceOp.Average else 1
        accumulated = max(passes, 1) if self.passes > 1 else 1
        return (size if self.predivide == 1 else self.predivide) * accumulated

    @property
    def tunable(self) -> bool:
        """Whether the size of buckets may change while the job trains, without changing its results."""
        return (
            self.size > 1
            and self.process_set.process_set_id == 0
            and type(self.process_set.group) is Group
            and self.compression is Compression.none
        )

    @property
    def ordered(self) -> bool:
        """Whether it matters in which order buckets are sent: whether they travel while backward goes on."""
        return self.size > 1 and not self.exchanges

    def seats(self, bucket: Bucket) -> bool:
        """Whether the bucket, before it is sent for the first time, moves into memory of the engine."""
        if bucket.seated or self.size == 1:
            return False
        group = self.process_set.group
        return isinstance(group, Group) and self.compression is Compression.none and bucket.bytes > LARGE

    def seat(self, bucket: Bucket, wait: Callable[[Any, torch.device], None]) -> None:
        """Move it; all ranks do so together."""
        group: Any = self.process_set.group
        bucket.seat(functools.partial(group.empty, wait=lambda work: wait(work, bucket.device)))

    def send(
        self,
        bucket: Bucket,
        wait: Callable[[Any, torch.device], None],
        *,
        timeout: datetime.timedelta | None = None,
    ) -> Sent:
        """Start summing the bucket over the ranks.

        Args:
            bucket: of gradients.
            wait: waits for what cannot go on meanwhile.
            timeout: after which the engine gives the sum up; None: its own.
        """
        if self.size == 1:
            return Sent(None, None, None)
        group, compression = self.process_set.group, cast("Any", self.compression)
        if self.exchanges:
            return self._exchange(bucket, compression, group, wait)
        wire, context = compression.compress(bucket.wire)
        work = group.allreduce([wire], _options(timeout))
        return Sent(work, None if wire is bucket.wire else wire, context)

    def receive(self, bucket: Bucket, sent: Sent) -> None:
        """After the work has ended: the bucket holds what the ranks sent, added up."""
        if sent.wire is not None and not isinstance(self.compression, GradientCompression):
            bucket.wire.copy_(self.compression.decompress(sent.wire, sent.context))

    def finish(self, bucket: Bucket, joined: float | torch.Tensor) -> None:
        """Make the average one of the ranks that are there: ``joined`` ranks sent nothing."""
        if self.op is not ReduceOp.Average or self.size == 1:
            return
        total = self.size if self.predivide == 1 else self.predivide
        factor = total / (self.size - joined)
        if isinstance(factor, torch.Tensor) or factor != 1:
            bucket.scale(factor)

    def _exchange(
        self,
        bucket: Bucket,
        compression: GradientCompression,
        group: dist.ProcessGroup,
        wait: Callable[[Any, torch.device], None],
    ) -> Sent:
        tail = bucket.tail.clone()
        wait(dist.all_reduce(tail, group=group, async_op=True), tail.device)
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


@functools.cache
def _options(timeout: datetime.timedelta | None) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timeout
    return options


@dataclass(frozen=True)
class Sent:
    """A bucket on its way: the work, and what travels if it is not the bucket itself."""

    work: Any
    wire: torch.Tensor | None
    context: Any

"""How gradients are reduced where each rank needs its chunk only."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.torch._rules import GradientCompression, Rule, Sent
from hora.torch.shard._moves import start_scatter

__all__ = ["ShardRule"]


@dataclass(frozen=True, kw_only=True)
class ShardRule(Rule):
    """A rule whose messages bring each rank its chunk of the sums."""

    @classmethod
    def of(cls, rule: Rule) -> ShardRule:
        """The same rule, for a sharded optimizer.

        Raises:
            GradientError: what needs the whole gradients on every rank.
        """
        if rule.op is ReduceOp.Adasum:
            raise GradientError(
                "op=hora.Adasum does not go with shard='optimizer': each rank steps with gradients and an "
                "optimizer state of its own there, and nothing can be shared out.",
                fix="Leave out shard, or op.",
            )
        if isinstance(rule.compression, GradientCompression):
            raise GradientError(
                f"compression={type(rule.compression).__name__} does not go with shard='optimizer': it "
                "sends factors or single elements of whole gradients, and a rank receives only a part.",
                fix="Write compression=hora.Compression.bf16 or fp16, or leave out shard.",
            )
        return cls(**{field.name: getattr(rule, field.name) for field in fields(rule)})

    def send(
        self,
        bucket: Any,
        wait: Callable[[Any, torch.device], None],
        *,
        timeout: datetime.timedelta | None = None,
    ) -> Sent:
        """Start summing the bucket over the ranks."""
        assert not isinstance(self.compression, GradientCompression), "of() refuses it"
        if self.size == 1:
            return Sent(None, None, None)
        group = self.process_set.group
        wire, context = self.compression.compress(bucket.wire)
        if wire is bucket.wire:
            return Sent(start_scatter(bucket.result, wire, group, timeout=timeout), None, None)
        output = torch.empty_like(bucket.result, dtype=wire.dtype)
        return Sent(start_scatter(output, wire, group, timeout=timeout), output, context)

    def receive(self, bucket: Any, sent: Sent) -> None:
        """After the work has ended: the bucket has this rank's chunk of the sum."""
        assert not isinstance(self.compression, GradientCompression), "of() refuses it"
        if sent.wire is not None:
            bucket.result.copy_(self.compression.decompress(sent.wire, sent.context))

    def finish(self, bucket: Any, joined: float | torch.Tensor) -> None:
        """Make the sum an average; nobody has joined."""
        if self.op is ReduceOp.Average and self.predivide != 1 and self.size > 1:
            bucket.scale(self.predivide / self.size)

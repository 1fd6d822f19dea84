"""The cycles of a sharded optimizer: those of ``Reducer``, over buffers that stay as they are."""

from __future__ import annotations

from typing import Any, cast

import torch

from hora.torch._context import Context
from hora.torch._reducer import Reducer
from hora.torch.shard._bucket import ShardBucket
from hora.torch.shard._rule import ShardRule

__all__ = ["ShardReducer"]


class ShardReducer(Reducer):
    """Sums gradients so that each rank gets its chunk.

    Args:
        context: of the job.
        buckets: of the optimizer; more may come later.
        rule: how the gradients are reduced.
        number: of the optimizer, among those that work over all ranks.
    """

    def __init__(
        self, context: Context, buckets: list[ShardBucket], *, rule: ShardRule, number: int | None
    ) -> None:
        self.buckets = buckets
        super().__init__(context, _members(buckets), bucket_mb=0.0, rule=rule, number=number)

    def extend(self) -> None:
        """More buckets have come."""
        self._abandon()
        self._named[:] = _members(self.buckets)
        self._arrange()

    def _arrange(self) -> None:
        """Buffers whose parameters are all frozen stay at home; others leave as they become complete."""
        trainable = [
            bucket
            for bucket in self.buckets
            if any(parameter.requires_grad for parameter in bucket.parameters)
        ]
        if self._ready.known:
            trainable.sort(key=self._completed)
        for index, bucket in enumerate(trainable):
            bucket.label = f"bucket {self._number} {index} {bucket.bytes}"
        self._take(cast("list[Any]", trainable))

    def _completed(self, bucket: ShardBucket) -> float:
        return max(self._ready.place(each) for each in bucket.parameters if each.requires_grad)


def _members(buckets: list[ShardBucket]) -> list[tuple[str, torch.Tensor]]:
    return [(member.name, member.parameter) for bucket in buckets for member in bucket.flat.members]

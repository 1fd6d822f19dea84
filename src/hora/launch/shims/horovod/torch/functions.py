"""``horovod.torch.functions``: parameters, optimizer state and objects over the ranks."""

from __future__ import annotations

from hora.torch.horovod import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

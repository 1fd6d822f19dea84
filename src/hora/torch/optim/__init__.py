"""Optimizers, schedules and parameter groups for large global batches."""

from __future__ import annotations

from hora.torch.optim.groups import decay_groups
from hora.torch.optim.lars import LARS
from hora.torch.optim.schedule import polynomial, set_lr

__all__ = ["LARS", "decay_groups", "polynomial", "set_lr"]

"""Learning-rate schedules, as pure functions of the optimizer step."""

from __future__ import annotations

import torch

from hora.torch import _context

__all__ = ["polynomial", "set_lr"]


def polynomial(step: int, *, base: float, end: float, warmup: int, total: int, power: float = 2.0) -> float:
    """The learning rate of a step: linear warm-up from 0, then polynomial decay.

    With w warm-up steps and T steps in all, counting from 0::

        lr(t) = base * (t + 1) / w                                         t < w
        lr(t) = end + (base - end) * (1 - (t - w) / (T - w)) ** power      w <= t < T
        lr(t) = end                                                        t >= T

    P. Goyal et al., arXiv:1706.02677 (warm-up); Y. You et al.,
    "Large Batch Training of Convolutional Networks", arXiv:1708.03888 (polynomial decay of power 2).

    Args:
        step: optimizer steps done before this one.
        base: peak learning rate.
        end: last learning rate.
        warmup: warm-up steps; 0: none.
        total: steps of the whole training, warm-up included.
        power: of the decay.
    """
    _context.planned(warmup, total)
    if step < warmup:
        return base * (step + 1) / warmup
    if step >= total:
        return end
    remaining = 1 - (step - warmup) / (total - warmup)
    # remaining is a float: mypy takes float ** float for Any, since a negative base would be complex.
    return end + (base - end) * float(remaining**power)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr

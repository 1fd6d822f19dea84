"""Learning-rate schedules, as pure functions of the optimizer step.

A step is a number: how many optimizer steps have been taken, or with ``per_step`` set to the global batch,
how many samples they took. Then warm-up, milestones and the total are in samples too, and stay what they are
when the global batch changes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import torch

from hora.core.errors import UsageError
from hora.torch import _context
from hora.torch.optim._check import batch_ratio

__all__ = ["cosine", "linear_rule", "polynomial", "set_lr", "sqrt_rule", "step_decay"]


def polynomial(
    step: int,
    *,
    base: float,
    end: float,
    warmup: int,
    total: int,
    power: float = 2.0,
    start: float = 0.0,
    per_step: int = 1,
) -> float:
    """The learning rate of a step: linear warm-up, then polynomial decay.

    With w warm-up steps and T steps in all, counting from 0::

        lr(t) = start + (base - start) * (t + 1) / w                       t < w
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
        start: where the warm-up comes from.
        per_step: how much a step adds to ``step``: the global batch, where all of these count samples. The
            first formula has t + per_step then.

    Raises:
        UsageError: ``per_step`` below 1.
    """
    rising, gone = _progress(step, base=base, start=start, warmup=warmup, total=total, per_step=per_step)
    if rising is not None:
        return rising
    # 1 - gone is a float: mypy takes float ** float for Any, since a negative base would be complex.
    return end + (base - end) * float((1 - gone) ** power) if gone < 1 else end


def cosine(
    step: int,
    *,
    base: float,
    warmup: int,
    total: int,
    end: float = 0.0,
    start: float = 0.0,
    per_step: int = 1,
) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine wave.

    After the warm-up of :func:`polynomial`::

        lr(t) = end + (base - end) * (1 + cos(pi * (t - w) / (T - w))) / 2      w <= t < T

    I. Loshchilov, F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983,
    equation 5, without restarts. The arguments are those of :func:`polynomial`.

    Raises:
        UsageError: ``per_step`` below 1.
    """
    rising, gone = _progress(step, base=base, start=start, warmup=warmup, total=total, per_step=per_step)
    if rising is not None:
        return rising
    return end + (base - end) * (1 + math.cos(math.pi * gone)) / 2 if gone < 1 else end


def step_decay(
    step: int,
    *,
    base: float,
    milestones: Sequence[int],
    factor: float = 0.1,
    warmup: int = 0,
    start: float = 0.0,
    per_step: int = 1,
) -> float:
    """The learning rate of a step: linear warm-up, then steps down.

    ``base`` times ``factor`` for each milestone that has been reached: the schedule of P. Goyal et al.,
    "ImageNet in 1 Hour", arXiv:1706.02677, section 5.1, with milestones after 30, 60 and 80
    of 90 epochs and a warm-up of 5 from the rate of a small batch.

    Args:
        step: optimizer steps done before this one.
        base: peak learning rate.
        milestones: steps, in ascending order, from which on the rate is lower.
        factor: of each.
        warmup: warm-up steps.
        start: where the warm-up comes from.
        per_step: as in :func:`polynomial`.

    Raises:
        UsageError: milestones that are not ascending, or ``per_step`` below 1.
    """
    if list(milestones) != sorted(milestones):
        raise UsageError(
            f"milestones={list(milestones)} are not in ascending order.",
            fix=f"Write milestones={sorted(milestones)}.",
        )
    last = milestones[-1] if milestones else warmup
    rising, _ = _progress(step, base=base, start=start, warmup=warmup, total=last, per_step=per_step)
    return rising if rising is not None else base * float(factor ** bisect.bisect_right(milestones, step))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def linear_rule(lr: float, *, batch: int, base_batch: int) -> float:
    """The learning rate for another global batch: ``lr * batch / base_batch``.

    P. Goyal et al., arXiv:1706.02677, section 2.1: k steps of SGD with lr on small batches go about as far as
    one with k * lr on all their samples, as long as the gradient changes little over them. So it needs a
    warm-up, and ends at some batch.
    """
    return lr * batch_ratio(batch, base_batch)


def sqrt_rule(lr: float, *, batch: int, base_batch: int) -> float:
    """The learning rate for another global batch: ``lr * sqrt(batch / base_batch)``.

    A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997, section
    5.2: the variance of a step stays what it was. The rule for LAMB (arXiv:1904.00962, section 4.1) and for
    Adam.
    """
    return lr * math.sqrt(batch_ratio(batch, base_batch))


def _progress(
    step: int, *, base: float, start: float, warmup: int, total: int, per_step: int
) -> tuple[float | None, float]:
    """The rate in a warm-up, else None; and the part of the time after it that is gone, 1 at the end."""
    if per_step < 1:
        raise UsageError(
            f"per_step={per_step}: a step adds 1 step, or the samples of a global batch.",
            fix="Write per_step=global_batch, or leave it out to count steps.",
        )
    _context.planned(-(-warmup // per_step), -(-total // per_step))
    if step < warmup:
        return start + (base - start) * min((step + per_step) / warmup, 1.0), 0.0
    return None, 1.0 if step >= total else (step - warmup) / (total - warmup)

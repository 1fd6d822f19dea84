"""The gradient noise scale: how large a global batch still pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hora.adapter.ops import ReduceOp
from hora.core.errors import UsageError
from hora.torch._collectives import allreduce

__all__ = ["GradientNoise", "noise_of"]


class GradientNoise:
    """Measures the gradient noise scale in a job: about the global batch up to which more samples pay.

    S. McCandlish, J. Kaplan, D. Amodei et al., "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162, appendix A.1. A gradient of b samples has the squared norm |G|^2 + tr(S) / b on average,
    so two batch sizes tell both. They are there for nothing: the gradients of each worker's backward pass, b
    samples, and their average over workers and passes, B samples::

        |G|^2 = (B * |g_B|^2 - b * |g_b|^2) / (B - b)
        tr(S) = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)
        scale = mean of tr(S) / mean of |G|^2         over steps: exponential moving averages

    Both are unbiased, and noisy; their means are divided, not the other way round. With a global batch of
    ``scale`` a training needs twice the steps of an endless batch, and twice the samples of a small one
    (:meth:`cost`). It grows while the loss falls.

        noise = GradientNoise(optimizer, global_batch=256)
        ...
        loss.backward()
        noise.update()                                 # after backward, before clipping
        optimizer.step()

    It counts on passes of one size. Norms of parameters' gradients and one small message are taken at each
    ``every``-th update. A ``GradScaler``'s scale cancels out, as long as it stays.

    Args:
        optimizer: what ``DistributedOptimizer`` returned, with ``op=Average``; not ``shard="all"``, where no
            rank ever has its own whole gradients.
        global_batch: samples per step over all workers and backward passes.
        every: updates from one measurement to the next.
        decay: of the moving averages, per measurement.

    Attributes:
        measured: how often it has been measured.

    Raises:
        UsageError: an optimizer of another kind, or a number out of its range.
    """

    def __init__(
        self, optimizer: Optimizer, *, global_batch: int, every: int = 10, decay: float = 0.95
    ) -> None:
        attachment = getattr(optimizer, "_hora", None)
        if attachment is None or not hasattr(attachment, "rule"):
            raise UsageError(
                f"GradientNoise takes a distributed optimizer, not a plain {type(optimizer).__name__}.",
                fix="Write GradientNoise(hora.DistributedOptimizer(optimizer, model), ...).",
            )
        if attachment.fully or attachment.rule.op is not ReduceOp.Average:
            what = "shard='all'" if attachment.fully else f"op={attachment.rule.op.name}"
            raise UsageError(
                f"GradientNoise does not go with {what}: it compares gradients of ranks with their average.",
                fix="Measure without it: the noise scale does not depend on how gradients travel.",
            )
        if global_batch < 1 or every < 1 or not 0 <= decay < 1:
            raise UsageError(
                f"GradientNoise takes global_batch and every of 1 or more and decay from 0 to below 1, not "
                f"{global_batch}, {every} and {decay}.",
                fix="Write for example global_batch=256, every=10, decay=0.95.",
            )
        self.measured = 0
        self._global_batch, self._every, self._decay = global_batch, every, decay
        self._attachment = attachment
        self._updates = 0
        self._in_share = False  # the passes are those of a loader's micro-batches
        self._squared, self._spread = 0.0, 0.0
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._own: list[list[Tensor]] = [[] for _ in self._parameters]  # a norm for each backward pass
        for norms, parameter in zip(self._own, self._parameters, strict=True):
            if parameter.requires_grad:
                parameter.register_hook(self._hook(norms))

    @property
    def scale(self) -> float:
        """tr(S) / |G|^2, in samples.

        It is nan before the first measurement, and where there is one batch size only: one worker with one
        backward pass per step. Infinite where no gradient is seen through the noise.
        """
        if not self.measured:
            return math.nan
        return self._spread / self._squared if self._squared > 0 else math.inf

    def cost(self, global_batch: int) -> tuple[float, float]:
        """What a training with this global batch takes: steps, over those of an endless batch, and samples,
        over those of the smallest. Equation 2.11 of the paper: 1 + scale / B and 1 + B / scale.
        """
        return 1 + self.scale / global_batch, 1 + global_batch / self.scale

    @torch.no_grad()
    def update(self) -> None:
        """After the backward passes of a step, before the gradients are changed. Every rank calls it."""
        due = self._is_due
        self._updates += 1
        passes = max(map(len, self._own))
        ranks = self._attachment.rule.size
        if due and passes * ranks > 1:
            self._measure(passes, ranks)
        for norms in self._own:
            norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {
            "updates": self._updates,
            "measured": self.measured,
            "squared": self._squared,
            "spread": self._spread,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._updates, self.measured = state["updates"], state["measured"]
        self._squared, self._spread = state["squared"], state["spread"]

    @property
    def _is_due(self) -> bool:
        return self._updates % self._every == 0

    def _hook(self, norms: list[Tensor]) -> Any:
        def hook(gradient: Tensor) -> None:
            if self._is_due:
                self._in_share = self._attachment.context.turn.count > 1
                norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient)))

        return hook

    def _measure(self, passes: int, ranks: int) -> None:
        rule = self._attachment.rule
        own = _sum_of_squares([norm for norms in self._own for norm in norms]) / passes
        if ranks > 1:
            own = allreduce(own, name="gradient noise", process_set=rule.process_set)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        whole = _sum_of_squares([torch.linalg.vector_norm(gradient) for gradient in gradients])
        if rule.passes == 1 and not self._in_share:
            whole = whole / passes**2  # several passes were added up; those of a loader's share are a mean
        small = self._global_batch / (passes * ranks)
        squared, spread = noise_of(float(own), float(whole), small=small, large=self._global_batch)
        self.measured += 1
        weight = (1 - self._decay) / (
            1 - self._decay**self.measured
        )  # early ones count as much as later ones
        self._squared += weight * (squared - self._squared)
        self._spread += weight * (spread - self._spread)


def noise_of(own: float, whole: float, *, small: float, large: float) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and tr(S), from mean squared norms of gradients of two batch sizes.

    Args:
        own: mean of |g|^2 over gradients of ``small`` samples.
        whole: the same of ``large`` samples.
        small: samples of the smaller batch.
        large: samples of the larger batch.
    """
    squared = (large * whole - small * own) / (large - small)
    return squared, (own - whole) / (1 / small - 1 / large)


def _sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype is torch.float64 else torch.float32

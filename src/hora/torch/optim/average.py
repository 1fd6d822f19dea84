"""An exponential moving average of a model's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hora.core.errors import UsageError
from hora.torch._layerwise import HALF, local
from hora.torch.optim._check import batch_ratio

__all__ = ["ParameterAverage", "ema_rule"]


class ParameterAverage:
    """Keeps an exponential moving average of a model's parameters, to evaluate and to deploy.

    After each step, with w the parameters and a their average::

        a <- d * a + (1 - d) * w          d = decay, or min(decay, (1 + t) / (10 + t)) at step t with warmup

    B. T. Polyak, A. B. Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); the warm-up,
    without which the average remembers the initial weights for 1 / (1 - decay) steps, is that of
    TensorFlow's ``ExponentialMovingAverage``.

    ``torch.optim.swa_utils.AveragedModel`` keeps a second module instead, and is as good where nothing more
    is needed. This one has the warm-up, evaluates in the model itself, and takes models of any ``shard``,
    which cannot be copied. The average is the same on all ranks, since the parameters are; with
    ``shard="all"`` each rank has its part. Buffers, such as running statistics, are not averaged: those of
    the model itself count.

    Args:
        model: whose trainable parameters are averaged. With ``DistributedOptimizer(..., shard="all")`` make
            the average after the optimizer.
        decay: 0 to below 1. :func:`ema_rule` gives that of another global batch.
        warmup: let early steps count more.

    Attributes:
        steps: updates so far.
        averages: by the name of the parameter; float32 for half-precision parameters.

    Raises:
        UsageError: a decay out of its range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise UsageError(
                f"ParameterAverage takes a decay from 0 to below 1, not {decay}.",
                fix="Write for example decay=0.999.",
            )
        self.decay, self.warmup, self.steps = decay, warmup, 0
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self.averages = {name: _wide(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizer: let the parameters count."""
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        averages = [local(average) for average in self.averages.values()]
        values = [
            local(parameter).to(average.dtype)
            for parameter, average in zip(self._parameters.values(), averages, strict=True)
        ]
        get_ema_multi_avg_fn(decay)(averages, values, None)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages as its parameters: evaluate, or save, without training it."""
        kept = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._put(self.averages.values())
        try:
            yield
        finally:
            self._put(kept)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"steps": self.steps, "averages": dict(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            UsageError: averages of other parameters.
        """
        if state["averages"].keys() != self.averages.keys():
            wrong = sorted(state["averages"].keys() ^ self.averages.keys())
            raise UsageError(
                f"The averages are not of this model's parameters: {wrong[0]} is on one side only.",
                fix="Load the average that was saved with this model.",
            )
        self.steps = state["steps"]
        for name, average in self.averages.items():
            average.copy_(_like(state["averages"][name], average))

    @torch.no_grad()
    def _put(self, values: Any) -> None:
        for parameter, value in zip(self._parameters.values(), values, strict=True):
            parameter.copy_(value)


def ema_rule(decay: float, *, batch: int, base_batch: int) -> float:
    """The decay for another global batch: ``decay ** (batch / base_batch)``.

    D. Busbridge et al., "How to Scale Your EMA", arXiv:2307.13813, section 2: the average forgets per sample,
    not per step.
    """
    return float(decay ** batch_ratio(batch, base_batch))


def _wide(parameter: Tensor) -> Tensor:
    wide = torch.float32 if parameter.dtype in HALF else parameter.dtype
    return parameter.detach().to(wide, copy=True)


def _like(value: Tensor, model: Any) -> Tensor:
    """A whole tensor as this rank's part of one, where the model is spread."""
    if not hasattr(model, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(model.device)
    return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None)

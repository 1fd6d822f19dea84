"""LARS: a learning rate per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hora.core.errors import UsageError

__all__ = ["LARS"]


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling, for large global batches.

    Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888. For
    each parameter tensor w with gradient g, weight decay d and momentum buffer v::

        trust = eta * |w| / (|g| + d * |w| + epsilon)      1 where |w| or |g| is 0, or trust=False
        v <- momentum * v + lr * trust * (g + d * w)
        w <- w - v

    The learning rate is inside the momentum buffer, as in the paper and in the MLPerf reference: when
    ``lr`` changes, steps taken before keep the rate they were taken with.

    Args:
        params: parameters or parameter groups. A group with ``trust=False`` (normalizations, biases; see
            :func:`decay_groups`) takes plain momentum steps.
        lr: learning rate, >= 0.
        momentum: 0 to below 1.
        weight_decay: d.
        eta: trust coefficient; 0.001 in the paper and in MLPerf.
        epsilon: 0 in MLPerf.

    Raises:
        UsageError: a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        epsilon: float = 0.0,
        trust: bool = True,
    ) -> None:
        for name, value, limit in (
            ("lr", lr, None),
            ("momentum", momentum, 1.0),
            ("weight_decay", weight_decay, None),
            ("eta", eta, None),
            ("epsilon", epsilon, None),
        ):
            if not value >= 0 or (limit is not None and value >= limit):
                reach = "at least 0" if limit is None else f"from 0 to below {limit:g}"
                raise UsageError(
                    f"LARS takes {name} {reach}, not {value}.", fix=f"Write for example {_EXAMPLE[name]}."
                )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "epsilon": epsilon,
            "trust": trust,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; ``closure``, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step_group(group, weights)
        return loss

    def _step_group(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers: list[Tensor] = [self.state[weight]["momentum_buffer"] for weight in weights]
        updates = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        if group["trust"]:
            rates = group["lr"] * _trust(weights, gradients, group)
            torch._foreach_mul_(updates, list(rates.unbind()))
        else:
            torch._foreach_mul_(updates, group["lr"])
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(weights, buffers)


def _trust(weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Tensor:
    """One trust ratio per tensor, without waiting for the device."""
    weight_norms = torch.stack(torch._foreach_norm(weights))
    gradient_norms = torch.stack(torch._foreach_norm(gradients))
    below = gradient_norms + group["weight_decay"] * weight_norms + group["epsilon"]
    ratio = group["eta"] * weight_norms / below
    return torch.where((weight_norms > 0) & (gradient_norms > 0), ratio, torch.ones_like(ratio))


_EXAMPLE = {
    "lr": "lr=5.0",
    "momentum": "momentum=0.9",
    "weight_decay": "weight_decay=2e-4",
    "eta": "eta=0.001",
    "epsilon": "epsilon=0.0",
}

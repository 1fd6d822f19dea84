"""LARS: a learning rate per layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hora.torch._layerwise import Layerwise, Members, Stage
from hora.torch.optim._check import check_ranges

__all__ = ["LARS"]


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling, for large global batches.

    Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888. For
    each parameter tensor w with gradient g, weight decay d and momentum buffer v::

        trust = eta * |w| / (|g| + d * |w| + epsilon)      1 where |w| or |g| is 0, or trust=False
        v <- momentum * v + lr * trust * (g + d * w)
        w <- w - v

    The learning rate is inside the momentum buffer, as in the paper: when ``lr`` changes, steps taken before
    keep the rate they were taken with. With ``lr_in_momentum=False`` it is outside, as in
    ``torch.optim.SGD``::

        v <- momentum * v + g + d * w
        w <- w - lr * trust * v

    Both forms train MLPerf's ResNet-50 of v0.6; at 32k samples per step they need different numbers of epochs
    (S. Kumar et al., "Scale MLPerf-0.6 models on Google TPU-v3 Pods", arXiv:1909.09756). While lr and trust
    are constant they are the same.

    Args:
        params: parameters or parameter groups. A group with ``trust=False`` (normalizations, biases; see
            :func:`decay_groups`) takes plain momentum steps.
        lr: learning rate, >= 0.
        momentum: 0 to below 1.
        weight_decay: d.
        eta: trust coefficient; 0.001 in the paper and in MLPerf.
        epsilon: 0 in MLPerf.
        lr_in_momentum: which of the two forms.
        master: step float16 and bfloat16 parameters in a float32 copy, which is part of the state.

    Raises:
        UsageError: a value out of its range, or parameters that are not real numbers. By ``step()``: a
            sparse gradient.
    """

    columns: ClassVar[int] = 2

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
        lr_in_momentum: bool = True,
        master: bool = True,
    ) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "epsilon": epsilon,
        }
        check_ranges("LARS", numbers, _EXAMPLE)
        super().__init__(
            params, numbers | {"trust": trust, "lr_in_momentum": lr_in_momentum, "master": master}
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a state that was saved before there were these
            group.setdefault("lr_in_momentum", True)
            group.setdefault("master", True)

    def _stage(self, group: dict[str, Any], members: Members) -> Stage:
        weights, gradients, lr = members.weights, members.gradients, group["lr"]
        updates = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        rates: Any = lr
        if group["trust"]:
            weight_norms, gradient_norms = yield weights, gradients
            rates = (lr * _trust(weight_norms, gradient_norms, group)).unbind()
        buffers = members.rows("momentum_buffer")
        torch._foreach_mul_(buffers, group["momentum"])
        if group["lr_in_momentum"]:
            torch._foreach_mul_(updates, rates)
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(weights, buffers)
        else:
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(weights, torch._foreach_mul(buffers, rates))


def _trust(weight_norms: Tensor, gradient_norms: Tensor, group: dict[str, Any]) -> Tensor:
    """One trust ratio per tensor, without waiting for the device."""
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

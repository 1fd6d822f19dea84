"""NovoGrad: normalized gradients, with one second moment per layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hora.torch._layerwise import HALF, Layerwise, Members, Stage
from hora.torch.optim._check import check_ranges

__all__ = ["NovoGrad"]


class NovoGrad(Layerwise):
    """Momentum on gradients that are normalized by layer, with decoupled weight decay.

    B. Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
    Networks", arXiv:1905.11286, algorithm 1. For each parameter tensor w with gradient g, weight decay d::

        v <- |g| ** 2                                   at its first step
        v <- beta2 * v + (1 - beta2) * |g| ** 2         afterwards: one number for the tensor
        m <- beta1 * m + g / (sqrt(v) + epsilon) + d * w
        w <- w - lr * m

    With ``averaging=True`` what is added to m has the factor 1 - beta1. The state is half that of Adam.
    Every tensor is normalized, biases too: a group's ``trust`` means nothing here.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, >= 0.
        betas: 0.95 and 0.98 in the paper.
        epsilon: keeps a gradient of 0 from a division by 0.
        weight_decay: d.
        averaging: m is an average of gradients rather than a sum.
        master: step float16 and bfloat16 parameters in a float32 copy, which is part of the state.

    Raises:
        UsageError: a value out of its range, or parameters that are not real numbers. By ``step()``: a
            sparse gradient.
    """

    columns: ClassVar[int] = 1

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        averaging: bool = False,
        master: bool = True,
    ) -> None:
        numbers = {"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay}
        check_ranges("NovoGrad", numbers | {"beta1": betas[0], "beta2": betas[1]}, _EXAMPLE)
        super().__init__(params, numbers | {"betas": betas, "averaging": averaging, "master": master})

    def _stage(self, group: dict[str, Any], members: Members) -> Stage:
        beta1, beta2 = group["betas"]
        weights, gradients = members.weights, members.gradients
        (norms,) = yield (gradients,)
        seconds = _seconds(members, norms, beta2)
        below = torch.stack(seconds).sqrt() + group["epsilon"]
        updates = list(torch._foreach_div(gradients, list(below.unbind())))
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        moments = members.rows("exp_avg")
        torch._foreach_mul_(moments, beta1)
        torch._foreach_add_(moments, updates, alpha=1 - beta1 if group["averaging"] else 1)
        torch._foreach_add_(weights, moments, alpha=-group["lr"])


def _seconds(members: Members, norms: Tensor, beta2: float) -> list[Tensor]:
    """Each tensor's second moment, after this step."""
    found = []
    for parameter, entries, norm in zip(members.parameters, members.states, norms.unbind(), strict=True):
        square = norm.square().to(torch.float32 if parameter.dtype in HALF else parameter.dtype)
        if "exp_avg_sq" in entries:
            entries["exp_avg_sq"].lerp_(square, 1 - beta2)
        else:
            entries["exp_avg_sq"] = square.clone()
        found.append(entries["exp_avg_sq"])
    return found


_EXAMPLE = {
    "lr": "lr=0.01",
    "epsilon": "epsilon=1e-8",
    "weight_decay": "weight_decay=0.001",
    "beta1": "betas=(0.95, 0.98)",
    "beta2": "betas=(0.95, 0.98)",
}

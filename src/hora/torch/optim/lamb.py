"""LAMB: Adam with a learning rate per layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hora.core.errors import UsageError
from hora.torch._layerwise import Layerwise, Members, Stage
from hora.torch.optim._check import check_ranges

__all__ = ["LAMB"]


class LAMB(Layerwise):
    """Layer-wise adaptive moments, for large global batches of models that Adam trains.

    Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    arXiv:1904.00962, algorithm 2. For each parameter tensor w with gradient g at its t-th step, weight decay
    d::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g ** 2
        r  = m / (1 - beta1 ** t) / (sqrt(v / (1 - beta2 ** t)) + epsilon)
        u  = r + d * w
        w <- w - lr * phi(|w|) / |u| * u          the factor is lr where |w| or |u| is 0, or trust=False
        phi(z) = min(max(z, low), high)           z itself without bounds

    With ``trust=False`` a group takes the steps of ``torch.optim.AdamW``.

    Args:
        params: parameters or parameter groups. A group with ``trust=False`` (normalizations, biases; see
            :func:`decay_groups`) is adapted element by element only.
        lr: learning rate, >= 0. For BERT the paper has 0.005 / sqrt(2) ** k at 32,768 / 2 ** k samples.
        betas: decay of the averages of gradients and of their squares.
        epsilon: 1e-6 in the paper.
        weight_decay: d; 0.01 in the paper.
        bias_correction: divide by 1 - beta ** t; without, warm-up has to do it.
        bounds: low and high of phi.
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
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        bounds: tuple[float, float] | None = None,
        trust: bool = True,
        master: bool = True,
    ) -> None:
        numbers = {"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay}
        check_ranges("LAMB", numbers | {"beta1": betas[0], "beta2": betas[1]}, _EXAMPLE)
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            raise UsageError(
                f"LAMB takes bounds (low, high) with 0 <= low <= high, not {bounds}.",
                fix="Write for example bounds=(0.0, 10.0), or leave it out.",
            )
        options = {"bias_correction": bias_correction, "bounds": bounds, "trust": trust, "master": master}
        super().__init__(params, numbers | {"betas": betas} | options)

    def _stage(self, group: dict[str, Any], members: Members) -> Stage:
        beta1, beta2 = group["betas"]
        weights, gradients = members.weights, members.gradients
        averages, squares = members.rows("exp_avg"), members.rows("exp_avg_sq")
        steps = _count(members)
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        below = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(below, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["epsilon"])
        updates = list(torch._foreach_div(averages, below))
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        rates: Any = group["lr"]
        if group["trust"]:
            weight_norms, update_norms = yield weights, updates
            phi = weight_norms if group["bounds"] is None else weight_norms.clamp(*group["bounds"])
            ratio = phi / update_norms
            plain = torch.ones_like(ratio)
            ratio = torch.where((weight_norms > 0) & (update_norms > 0), ratio, plain)
            rates = (group["lr"] * ratio).unbind()
        torch._foreach_mul_(updates, rates)
        torch._foreach_sub_(weights, updates)


def _count(members: Members) -> list[float]:
    """Each parameter's steps, this one included."""
    for entries in members.states:
        if "step" not in entries:
            entries["step"] = torch.zeros((), dtype=torch.float32)
        entries["step"] += 1
    return [float(entries["step"]) for entries in members.states]


_EXAMPLE = {
    "lr": "lr=0.002",
    "epsilon": "epsilon=1e-6",
    "weight_decay": "weight_decay=0.01",
    "beta1": "betas=(0.9, 0.999)",
    "beta2": "betas=(0.9, 0.999)",
}

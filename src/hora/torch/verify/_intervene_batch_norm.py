"""Batch norm over the batches of all ranks together: an experiment of ``hora verify``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_all_reduce = dist.all_reduce  # before the recorder looks on

__all__ = ["shared_batch_norm"]


def shared_batch_norm(  # noqa: PLR0917 - torch's order of arguments
    group: Any,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """What ``torch.nn.functional.batch_norm`` gives for the union of the ranks' batches."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    count = torch.full((1,), x.numel() / max(x.shape[1], 1), dtype=torch.float64, device=x.device)
    total: torch.Tensor = _Sum.apply(torch.cat([x.double().sum(axes), count]), group)  # type: ignore[no-untyped-call]
    mean = total[:-1] / total[-1]
    centred = x.double() - mean.view(shape)
    squares: torch.Tensor = _Sum.apply(centred.square().sum(axes), group)  # type: ignore[no-untyped-call]
    variance = squares / total[-1]
    output = (centred * torch.rsqrt(variance + eps).view(shape)).to(x.dtype)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    with torch.no_grad():
        unbiased = variance * total[-1] / (total[-1] - 1)
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_((momentum * new).to(running.dtype))
    return output


class _Sum(torch.autograd.Function):
    """The sum over the ranks; so is its gradient, since every rank's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


def _summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    wire = tensor.detach().cpu().clone()
    _all_reduce(wire, group=group)
    return wire.to(tensor.device)

"""Batch norm whose statistics are those of all ranks' batches together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.torch._context import required
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._request import Request, dispatcher

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the union of the ranks' batches, for inputs of shape ``(N, C)`` or ``(N, C, ...)``.

    While training it gives what ``torch.nn.BatchNorm2d`` gives on one worker with the union batch, on the
    CPU too. Local batches may differ in size, and be empty. Gradients of the weight and the bias are this
    rank's own, which ``DistributedOptimizer`` averages as all others. In evaluation it is plain batch norm.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None for their plain mean.
        affine: whether there are a weight and a bias.
        track_running_stats: whether running statistics are kept, and used in evaluation.
        process_set: the ranks whose batches count; only they call.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        CollectiveError: an input of another shape, or one value per channel in all batches together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """The module with each batch norm in it replaced, parameters and statistics kept.

        Call it before the optimizer is made, or give the optimizer the same parameters: they stay the same
        objects.
        """
        if isinstance(module, _BatchNorm):
            plain = module
            changed = cls(
                plain.num_features,
                plain.eps,
                plain.momentum,
                affine=False,
                track_running_stats=False,
                process_set=process_set,
            )
            changed.affine, changed.track_running_stats = plain.affine, plain.track_running_stats
            for name in ("weight", "bias"):
                changed.register_parameter(name, getattr(plain, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                changed.register_buffer(name, getattr(plain, name))
            changed.training = plain.training
            return changed
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child, process_set)
            if converted is not child:
                module.add_module(name, converted)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A process set is a place in the job, not part of the model: copies share it.
        memo[id(self.process_set)] = self.process_set
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalize ``input``."""
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise CollectiveError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {tuple(input.shape)}.",
                fix=f"Give shape (N, {self.num_features}, ...).",
            )
        from_batch = self.training or self.running_mean is None
        if not from_batch:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        required("SyncBatchNorm")
        member_set(self.process_set, function="SyncBatchNorm")
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        result: torch.Tensor = output
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        """Checked by ``forward``, with a message of its own."""

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - factor).add_((factor * new).to(running.dtype))


class _Normalize(torch.autograd.Function):
    """Returns the output, and the mean, the variance and the count of the union batch, in float64."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> Any:
        channels = x.shape[1]
        axes = [axis for axis in range(x.dim()) if axis != 1]
        own = x.numel() // channels if channels else 0
        wide = _wide(x.dtype)
        # The ranks exchange (count, mean, variance), not sums of squares, which would cancel.
        table = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=x.device)
        if own:
            variance, mean = torch.var_mean(x.to(wide), axes, correction=0)
            table[0, 0] = own
            table[0, 1 : 1 + channels], table[0, 1 + channels :] = mean, variance
        everyone = _collective(Kind.ALLGATHER, table, process_set)
        counts, means, variances = everyone[:, :1], everyone[:, 1 : 1 + channels], everyone[:, 1 + channels :]
        count = counts.sum()
        if count <= 1:
            raise CollectiveError(
                f"SyncBatchNorm got {int(count)} values per channel in the batches of all ranks together.",
                fix="Give a larger batch, or call model.eval().",
            )
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.process_set = process_set
        ctx.has_bias = bias is not None
        shape = [1, channels] + [1] * (x.dim() - 2)
        slope = scale if weight is None else scale * weight
        # (x - mean) first: where the mean is large, x * slope + shift would lose digits.
        output = (x.to(wide) - mean.to(wide).view(shape)) * slope.to(wide).view(shape)
        if bias is not None:
            output += bias.to(wide).view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, scale, count = ctx.saved_tensors
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        wide = _wide(x.dtype)
        gradient = gradient.to(wide)
        normal = (x.to(wide) - mean.to(wide).view(shape)) * scale.to(wide).view(shape)
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        by_bias, by_weight = sums[0], sums[1]
        by_input = None
        if ctx.needs_input_grad[0]:
            means = (_collective(Kind.ALLREDUCE, sums, ctx.process_set) / count).to(wide)
            slope = scale if weight is None else scale * weight
            centred = gradient - means[0].view(shape) - normal * means[1].view(shape)
            by_input = (centred * slope.to(wide).view(shape)).to(x.dtype)
        return (
            by_input,
            None if weight is None else by_weight.to(weight.dtype),
            by_bias.to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _collective(kind: Kind, tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    request = Request(kind=kind, tensors=[tensor], op=ReduceOp.Sum, process_set=process_set)
    result: torch.Tensor = dispatcher().submit(request).wait()
    return result

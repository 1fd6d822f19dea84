"""Gradient compression that keeps what it left out and sends it later.

Both add the *error* of the last step to the gradient, send an approximation, and keep the difference as
the new error, so that over time everything arrives (Karimireddy et al., "Error Feedback Fixes SignSGD and
other Gradient Compression Schemes", arXiv:1901.09847).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hora.core.errors import GradientError
from hora.torch._wire import gather_flat

__all__ = ["PowerSGD", "TopK"]


class TopK:
    """Sends the largest elements of each gradient.

    Args:
        ratio: the share of elements that is sent, above 0 and at most 1. Each costs its value and a place
            of 8 bytes, for all ranks: it pays where ``ratio`` is below 1 / (3 * ranks).
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise GradientError(f"TopK: ratio={ratio!r} is not above 0 and at most 1.", fix="Try ratio=0.01.")
        self.ratio = ratio
        self._errors: dict[str, torch.Tensor] = {}

    def exchange(
        self, gradients: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup
    ) -> None:
        """Overwrite each gradient with the sum of what the ranks sent of it."""
        size = dist.get_world_size(group)
        flats = [_with_error(self._errors, n, g).reshape(-1) for g, n in zip(gradients, names, strict=True)]
        counts = [min(flat.numel(), math.ceil(self.ratio * flat.numel())) for flat in flats]
        places = [flat.abs().topk(k).indices for flat, k in zip(flats, counts, strict=True)]
        values = torch.cat([flat[place] for flat, place in zip(flats, places, strict=True)])
        joined = torch.cat(places)
        all_places = joined.new_empty(size * joined.numel())
        all_values = values.new_empty(size * values.numel())
        gather_flat(all_places, joined, group)
        gather_flat(all_values, values, group)
        place_parts = torch.split(all_places.view(size, -1), counts, dim=1)
        value_parts = torch.split(all_values.view(size, -1), counts, dim=1)
        for index, (gradient, name, flat) in enumerate(zip(gradients, names, flats, strict=True)):
            total = torch.zeros_like(flat)
            total.index_add_(0, place_parts[index].reshape(-1), value_parts[index].reshape(-1))
            flat[places[index]] = 0
            self._errors[name] = flat.view(gradient.shape)
            gradient.copy_(total.view(gradient.shape))


class PowerSGD:
    """Sends two narrow factors of each gradient of two dimensions or more.

    A gradient, seen as a matrix of ``n`` rows and ``m`` columns, becomes ``P`` of ``n`` by ``rank`` and ``Q``
    of ``m`` by ``rank``; one step of power iteration, started from the last step's ``Q``, finds them. Vectors
    and small matrices are sent whole. (Vogels et al., "PowerSGD", arXiv:1905.13727, algorithms 1 and 2.)

    Args:
        rank: columns of the factors, 1 or more.
    """

    def __init__(self, rank: int = 4) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise GradientError(f"PowerSGD: rank={rank!r} is not 1 or more.", fix="Try rank=4.")
        self.rank = rank
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def exchange(
        self, gradients: Sequence[torch.Tensor], names: Sequence[str], group: dist.ProcessGroup
    ) -> None:
        """Overwrite each gradient with an approximation of the sum over the ranks."""
        size = dist.get_world_size(group)
        low = [gradient for gradient in gradients if not self._pays(gradient)]
        _sum(low, group)
        pairs = [(g, name) for g, name in zip(gradients, names, strict=True) if self._pays(g)]
        if not pairs:
            return
        matrices = [
            _with_error(self._errors, name, gradient).reshape(gradient.shape[0], -1)
            for gradient, name in pairs
        ]
        factors = [self._start(m, name) for m, (_, name) in zip(matrices, pairs, strict=True)]
        left = [m @ q for m, q in zip(matrices, factors, strict=True)]
        _sum(left, group)
        left = [torch.linalg.qr(p).Q for p in left]
        factors = [m.t() @ p for m, p in zip(matrices, left, strict=True)]
        _sum(factors, group)
        for matrix, p, q, (gradient, name) in zip(matrices, left, factors, pairs, strict=True):
            total = p @ q.t()
            self._factors[name] = q
            # The errors of all ranks together are what is missing from the sum.
            self._errors[name] = (matrix - total / size).view(gradient.shape)
            gradient.copy_(total.view(gradient.shape))

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.is_floating_point():
            return False
        rows = gradient.shape[0]
        columns = gradient.numel() // max(rows, 1)
        return (rows + columns) * self.rank < rows * columns

    def _start(self, matrix: torch.Tensor, name: str) -> torch.Tensor:
        factor = self._factors.get(name)
        if factor is None or factor.shape[0] != matrix.shape[1] or factor.dtype != matrix.dtype:
            # The same on every rank.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factor = torch.randn(matrix.shape[1], self.rank, generator=generator, dtype=torch.float64)
            factor = factor.to(device=matrix.device, dtype=matrix.dtype)
        return factor


def _with_error(errors: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of the gradient plus what was left out before, in float32 or wider."""
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    wide = gradient.to(
        torch.float32 if half else gradient.dtype, memory_format=torch.contiguous_format, copy=True
    )
    error = errors.get(name)
    if error is not None and error.shape == wide.shape:
        wide += error
    return wide


def _sum(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one dtype over the ranks, in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))

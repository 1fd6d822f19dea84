"""Adasum: a sum that adapts to how far the ranks' tensors point the same way.

Of two vectors ``a`` and ``b`` it makes

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

so that orthogonal vectors are added, and equal ones averaged. More ranks are combined as a binary tree:
neighbours first, then pairs of pairs. (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", arXiv:2006.02924, equation 2 and section 4.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hora.core.errors import CollectiveError
from hora.torch._wire import gather_flat

__all__ = ["adasum", "check_adasum", "combine"]


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two vectors; dot products in float64. A vector of zeros counts for nothing."""
    # Copies, since the order of additions may depend on where in memory a vector starts, and all ranks that
    # combine this pair shall get the same bits.
    wide_a, wide_b = (vector.reshape(-1).to(torch.float64, copy=True) for vector in (a, b))
    dot, norm_a, norm_b = (float(x) for x in (wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b))
    factor_a = 1 - dot / (2 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1 - dot / (2 * norm_b) if norm_b > 0 else 1.0
    return a * factor_a + b * factor_b


def check_adasum(dtype: torch.dtype, size: int, *, function: str) -> None:
    """Raise CollectiveError where Adasum has no meaning."""
    if not dtype.is_floating_point:
        raise CollectiveError(
            f"{function} has no Adasum of {str(dtype).removeprefix('torch.')} tensors.",
            fix="Write op=hora.Sum, or convert with tensor.float().",
        )
    if size & (size - 1):
        raise CollectiveError(
            f"{function}: Adasum combines ranks in pairs, which {size} ranks do not allow.",
            fix="Start 2, 4, 8, ... workers, or write op=hora.Average.",
        )


def adasum(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Adasum over the group of each tensor by itself; the tensors are contiguous and of one dtype.

    Each round a rank swaps vectors with the one whose number differs in one bit, and both combine the
    pair in the same order, so that all ranks end with the same bits.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = [tensor.numel() for tensor in tensors]
    mine = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distance = 1
    while distance < size and mine.numel() > 0:
        other = _swap(mine, rank ^ distance, group)
        first, second = (mine, other) if rank & distance == 0 else (other, mine)
        pairs = zip(torch.split(first, lengths), torch.split(second, lengths), strict=True)
        mine = torch.cat([combine(a, b) for a, b in pairs])
        distance *= 2
    return [part.view(tensor.shape) for part, tensor in zip(torch.split(mine, lengths), tensors, strict=True)]


def _swap(mine: torch.Tensor, partner: int, group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_world_size(group) == 2:
        both = mine.new_empty(2 * mine.numel())
        gather_flat(both, mine, group)
        return both.view(2, -1)[partner]
    other = torch.empty_like(mine)
    peer = dist.get_global_rank(group, partner)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    )
    for work in works:
        work.wait()
    return other

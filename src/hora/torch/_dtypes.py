"""In which dtype a reduction runs, and how its factors are applied."""

from __future__ import annotations

import torch

from hora.adapter.ops import ReduceOp

__all__ = ["REDUCED_IN", "reduced_in", "scaled_by"]

# dtype -> dtype in which it is reduced. Half precision is reduced in float32 and rounded once; the
# engines have no int16; bool follows as 0 and 1.
REDUCED_IN = {
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def reduced_in(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """The dtype in which a tensor of ``dtype`` is reduced by ``op``."""
    if op is ReduceOp.Average and not dtype.is_floating_point and dtype.itemsize < 4:
        return torch.int32  # the sum before the division would wrap
    return REDUCED_IN[dtype]


def scaled_by(tensor: torch.Tensor, factor: float, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor * factor``: integers by way of float64, towards zero; half precision in float32."""
    dtype = dtype or tensor.dtype
    if factor == 1.0:
        return tensor
    if not dtype.is_floating_point:
        return (tensor.double() * factor).to(dtype)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (tensor.to(wide) * factor).to(dtype)

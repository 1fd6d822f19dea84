"""Reductions of several tensors into one, in the order of ranks: all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from hora.core.errors import CollectiveError

__all__ = ["divide", "reduce_into", "reducible"]

Fold = Callable[..., torch.Tensor]

_SUM, _AVG, _PRODUCT, _MIN, _MAX = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
_FOLDS: dict[Any, Fold] = {
    _SUM: torch.add,
    _AVG: torch.add,
    _PRODUCT: torch.mul,
    _MIN: torch.minimum,
    _MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_TRUTH: dict[Any, Fold] = {
    _SUM: torch.logical_or,
    _PRODUCT: torch.logical_and,
    _MIN: torch.logical_and,
    _MAX: torch.logical_or,
}

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch computes with few unsigned dtypes; in two's complement, sums, products and bits are the same."""

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""Dtypes that add up in a wider one, so that they are rounded once and not once for each rank."""


_ADDED = frozenset(
    {
        *_SIGNED,
        *_WIDE,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    }
)
"""Dtypes that can be added up; torch has others, of bits and of parts of bytes, that can be moved only."""


def reducible(dtype: torch.dtype, op: Any) -> Any:
    """The plain form of a reduce operation.

    Raises:
        CollectiveError: it does not apply to the dtype.
    """
    kind = getattr(op, "op", op)
    if kind not in _FOLDS:
        raise CollectiveError(
            f"The shared-memory engine has no reduce operation {op}.",
            fix="Use SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR; scale the tensor before a SUM.",
        )
    if dtype not in _ADDED:
        raise CollectiveError(
            f"{kind.name} of {dtype} is not defined.",
            fix="Convert the tensor to a dtype that torch can add, or move it with all_gather.",
        )
    bits = kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    inexact = dtype.is_floating_point or dtype.is_complex
    if (bits and inexact) or (kind in (_MIN, _MAX) and dtype.is_complex):
        raise CollectiveError(
            f"{kind.name} of {dtype} is not defined.",
            fix="Use SUM, AVG or PRODUCT for complex numbers, and bit operations for integers and bool.",
        )
    if kind == _AVG and dtype in (*_SIGNED, torch.bool):
        raise CollectiveError(
            f"AVG of {dtype} is not defined.", fix="Use SUM and divide, or convert the tensor first."
        )
    return kind


def reduce_into(output: torch.Tensor, sources: Sequence[torch.Tensor], kind: Any) -> None:
    """Fill ``output`` with the reduction of ``sources``, of which the first may be ``output`` itself."""
    dtype = output.dtype
    if dtype is torch.bool:
        fold = _TRUTH.get(kind, _FOLDS[kind])
    else:
        fold = _FOLDS[kind]
        if dtype in _SIGNED:
            _reduce_unsigned(output, sources, kind, fold)
            return
        if dtype in _WIDE and (len(sources) > 2 or dtype.itemsize == 1 or kind == _AVG):
            wide = sources[0].to(_WIDE[dtype])
            for source in sources[1:]:
                fold(wide, source.to(_WIDE[dtype]), out=wide)
            if kind == _AVG:
                wide.div_(len(sources))
            output.copy_(wide)
            return
    if len(sources) == 1:
        if sources[0] is not output:
            output.copy_(sources[0])
        return
    fold(sources[0], sources[1], out=output)
    for source in sources[2:]:
        fold(output, source, out=output)
    if kind == _AVG:
        divide(output, len(sources))


def _reduce_unsigned(output: torch.Tensor, sources: Sequence[torch.Tensor], kind: Any, fold: Fold) -> None:
    signed = _SIGNED[output.dtype]
    views = [source.view(signed) for source in sources]
    result = views[0].clone()
    ordered = kind in (_MIN, _MAX)
    lowest = torch.iinfo(signed).min
    if ordered:  # with the highest bit turned, unsigned numbers have the order of signed ones
        result ^= lowest
    for view in views[1:]:
        fold(result, view ^ lowest if ordered else view, out=result)
    if ordered:
        result ^= lowest
    output.view(signed).copy_(result)


def divide(tensor: torch.Tensor, count: int) -> None:
    """Make a sum of so many an average; integers are cut towards zero."""
    if tensor.dtype is torch.complex32:  # torch cannot divide these, but their parts
        torch.view_as_real(tensor).div_(count)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.div_(count)
    else:
        tensor.div_(count, rounding_mode="trunc")

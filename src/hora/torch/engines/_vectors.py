"""Tensors of any shape and memory order as the vectors that the engine's algorithms take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from hora.core.errors import CollectiveError

__all__ = ["Flat", "Flats", "is_plain", "parts_of", "plain_vector", "source", "split_rows", "vector"]

Tensors = Sequence[torch.Tensor]


_keys = torch._C._dispatch_keys


def _known() -> int:
    """The bits of what torch looks at in a plain tensor: memory of the CPU, read as it is or conjugated."""
    one = torch.zeros(1, dtype=torch.complex64, device="cpu")
    with torch.inference_mode():
        other = torch.zeros(1, device="cpu")
    known = 0
    for tensor in (one, one.conj(), one.conj().imag, other):
        known |= _keys(tensor).raw_repr()
    return known


_STRANGE = ~_known()
_COMMON = _keys(torch.zeros(1, device="cpu")).raw_repr()


def is_plain(tensors: Tensors) -> bool:
    """Whether the engine takes these tensors: those that are nothing but memory of the CPU.

    Not so are those of other devices (meta, too), sparse and quantized ones, fake ones and other subclasses
    with operations of their own, and those that a transformation (``vmap``, ``functionalize``) has wrapped.

    Raises:
        CollectiveError: the memory of one has been given back; torch would read it nevertheless.
    """
    for tensor in tensors:
        if _keys(tensor).raw_repr() & _STRANGE:
            return False
        if not tensor.data_ptr() and tensor.numel():
            raise CollectiveError(
                f"A tensor of shape {tuple(tensor.shape)} has no memory: its storage was resized to 0 bytes.",
                fix="Give it memory first: tensor.untyped_storage().resize_(tensor.nbytes); FSDP's "
                "unshard() does that for its parameters.",
            )
    return True


def plain_vector(tensor: torch.Tensor) -> torch.Tensor | None:
    """What :func:`vector` gives, for the tensors that nearly all calls have; None says nothing of others."""
    if _keys(tensor).raw_repr() != _COMMON or not tensor.is_contiguous() or not tensor.data_ptr():
        return None
    return _in_a_row(tensor.data)


def vector(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own memory as a vector; None if it has gaps or another order.

    ``data`` and not ``detach()``: the engine's writing does not count as a change that autograd must know of.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_inference():  # it may be written in inference mode only, which is each thread's own
        return _alias(tensor)
    return _in_a_row(tensor.data)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(0, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def source(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a vector, copied where they are not one behind the other."""
    return _in_a_row(tensor.data.resolve_conj().resolve_neg().contiguous())


def _in_a_row(data: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a vector. A single element may have any stride, which views cannot bear."""
    if data.dim() == 1 and data.stride(0) == 1:
        return data
    return data.as_strided((data.numel(),), (1,))


class Flat:
    """A tensor as a vector that may be overwritten; what is written arrives in the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> torch.Tensor:
        flat = vector(self._tensor)
        self._copy = None if flat is not None else source(self._tensor).clone()
        return self._copy if flat is None else flat  # type: ignore[return-value]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None and self._copy is not None:
            with torch.inference_mode(self._tensor.is_inference()):
                self._tensor.data.copy_(self._copy.view(self._tensor.shape))


class Flats:
    """Several of them."""

    def __init__(self, tensors: Tensors) -> None:
        self._all = [Flat(tensor) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [each.__enter__() for each in self._all]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        for each in self._all:
            each.__exit__(kind, *rest)


def parts_of(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A vector for each rank, of a tensor that holds them one behind the other."""
    return list(tensor.data.view(-1).chunk(size)) if tensor.numel() else [tensor.data.view(-1)] * size


def split_rows(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[torch.Tensor]:
    return list(torch.split(tensor.data, list(splits) if splits else [tensor.shape[0] // size] * size))

"""Vectors in shared memory, in which ranks of one host read each other's data without copying it."""

# torch declares `reduceOp` with a narrower type than it takes.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.torch.engines._memory import Segment

__all__ = ["Buffer", "Buffers", "same_buffer", "shared_vector"]

_log = logging.getLogger(__name__)

LINE = 4096
"""Bytes at whose multiples the ranks' parts of a buffer start: pages."""

ALIGNMENT = 16
"""Bytes at whose multiples a vector in a buffer must start: the largest element has as many."""

_OFFSETS = 40
"""Bits of a place that tell the offset in the buffer: one TiB."""


START = LINE
"""Bytes before the first rank's part: what names the segment."""


class Buffer:
    """A vector of each rank of a team, in one segment.

    Args:
        number: of the buffer in its group, the same on all ranks.
        segment: holds all ranks' parts.
        stride: bytes from one rank's part to the next.
        index: this rank's number.
        size: number of ranks.

    Attributes:
        parts: the vector of each rank, as bytes.
    """

    def __init__(self, number: int, segment: Segment, *, stride: int, index: int, size: int) -> None:
        self.number, self.stride = number, stride
        self._segment, self._index = segment, index
        self.parts = [segment.bytes[START + i * stride : START + (i + 1) * stride] for i in range(size)]
        self.start = self.parts[index].data_ptr()

    @staticmethod
    def stride_of(size: int) -> int:
        """Bytes from one rank's part to the next, for parts of ``size`` bytes."""
        return max(-(-size // LINE), 1) * LINE

    @staticmethod
    def size_of(stride: int, ranks: int) -> int:
        """Bytes of the segment."""
        return START + stride * ranks

    def own(self, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, object]:
        """This rank's vector, and what dies with the last tensor that uses its memory."""
        start = START + self._index * self.stride
        memory = self._segment.memory[start : start + self.stride]
        return torch.frombuffer(memory, dtype=dtype, count=count), memory


class Buffers:
    """The buffers of a group."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sorted: list[Buffer] = []
        self._numbered: dict[int, Buffer] = {}
        self._unused: list[int] = []
        self._made = 0
        self._lock = threading.Lock()  # the queue's thread looks for places while others make buffers

    def next_number(self) -> int:
        """A number for the buffer that all ranks make next."""
        self._made += 1
        return self._made

    def add(self, buffer: Buffer, owner: object) -> None:
        """Know a buffer until ``owner`` is gone."""
        with self._lock:
            self._forget_unused()
            at = bisect.bisect(self._starts, buffer.start)
            self._starts.insert(at, buffer.start)
            self._sorted.insert(at, buffer)
            self._numbered[buffer.number] = buffer
        # It may be called at any time, from any thread, so it only takes a note.
        weakref.finalize(owner, self._unused.append, buffer.number)

    def place(self, tensors: Sequence[torch.Tensor]) -> int:
        """Where vectors that follow each other lie, for the other ranks: 0 if not in a buffer."""
        if not self._sorted:
            return 0
        address = start = tensors[0].data_ptr()
        for tensor in tensors:
            if tensor.data_ptr() != address:
                return 0
            address += tensor.numel() * tensor.element_size()
        with self._lock:
            self._forget_unused()
            at = bisect.bisect(self._starts, start) - 1
            if at < 0:
                return 0
            buffer = self._sorted[at]
        offset = start - buffer.start
        if address > buffer.start + buffer.stride or offset % ALIGNMENT:
            return 0
        return (buffer.number << _OFFSETS) | offset

    def views(self, places: Sequence[int], dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Every rank's vector of ``count`` elements, at the place in the same buffer that it told."""
        parts = self._numbered[places[0] >> _OFFSETS].parts
        found = []
        for part, place in zip(parts, places, strict=True):
            offset = place & ((1 << _OFFSETS) - 1)
            found.append(part[offset : offset + count * dtype.itemsize].view(dtype))
        return found

    def _forget_unused(self) -> None:
        while self._unused:
            buffer = self._numbered.pop(self._unused.pop())
            at = self._sorted.index(buffer)
            del self._starts[at], self._sorted[at]


def shared_vector(group: Any, count: int, dtype: torch.dtype, wait: Callable[[Any], None]) -> torch.Tensor:
    """A vector in memory that all ranks of the group share, or in ordinary memory on all of them."""
    buffers: Buffers = group.buffers
    size, number = group.size(), buffers.next_number()
    stride = Buffer.stride_of(count * dtype.itemsize)
    text = torch.zeros(256, dtype=torch.uint8, device="cpu")
    segment, problem = None, ""
    if group.rank() == 0:
        try:
            segment, where = Segment.create(Buffer.size_of(stride, size))
            text[: len(where)] = torch.frombuffer(bytearray(where.encode()), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            problem = str(error)
    broadcast = dist.BroadcastOptions()
    broadcast.rootRank, broadcast.rootTensor = 0, 0
    wait(group.broadcast([text], broadcast))
    where = bytes(text.tolist()).rstrip(b"\0").decode()
    if segment is None and where:
        try:
            segment = Segment.open(where)
        except (OSError, ValueError) as error:
            problem = str(error)
    everyone = dist.AllreduceOptions()
    everyone.reduceOp = dist.ReduceOp.MIN
    shared = torch.tensor([0 if segment is None else 1], dtype=torch.uint8, device="cpu")
    wait(group.allreduce([shared], everyone))
    if segment is not None:
        segment.seal()
    if segment is None or not shared.item():
        if problem:
            _log.warning("No shared memory for a vector of %d %s: %s.", count, dtype, problem)
        return torch.zeros(count, dtype=dtype, device="cpu")
    segment.prefer_huge_pages()
    buffer = Buffer(number, segment, stride=stride, index=group.rank(), size=size)
    vector, owner = buffer.own(dtype, count)
    buffers.add(buffer, owner)
    return vector


def same_buffer(places: Sequence[int]) -> bool:
    """Whether all ranks told a place in one buffer. It is alive on each, which has a vector in it."""
    first = places[0] >> _OFFSETS
    return first != 0 and all(place >> _OFFSETS == first for place in places)

"""The shared-memory engine: ranks of one host exchange flat tensors through memory that they share.

TensorFlow's own runtime sends through loopback TCP even inside a host. Here each rank writes a piece into its
slot, all meet at a barrier, and each reads the slots of the others; there are two sets of slots in turn, so
that one barrier for each piece is enough. Waiting is a futex: nobody spins.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hora.core import futex
from hora.tensorflow._engine import Group

__all__ = ["SharedEngine"]

SLOT = 1 << 22
"""Bytes of a piece: what stays in a processor's cache between the writer and the readers, or nearly."""

WORDS = 4
"""Barriers in turn; one that is two back is used by nobody any more, and is set to zero again."""

HEAD = 4096
"""Bytes before the slots: what tells the segment from others, and the words, each in a cache line."""

NONCE, LINE = 16, 64

LOOK = 0.25
"""Seconds between two looks whether the others are still there."""

MERGE: dict[str, Any] = {"Add": np.add, "Mul": np.multiply, "Min": np.minimum, "Max": np.maximum}

DIRECT = 3
"""Up to so many ranks each adds up all that there is; more share the work, for which they meet once more."""

Tensor = Any
Tell = Callable[[str, Group, bytes], list[bytes]]


class SharedEngine:
    """This rank's part; has the methods of :class:`hora.tensorflow._engine.Engine`.

    Args:
        timeout: seconds that a rank waits for the others.
        tell: the members of a group exchange bytes: for what, the group, this rank's; all ranks'.
    """

    device = "CPU:0"

    def __init__(self, *, timeout: float, tell: Tell) -> None:
        self._timeout = timeout
        self._tell = tell
        self._teams: dict[int, _Team] = {}
        self._order = threading.Lock()
        self._ended: list[str] = []

    def prepare(self, group: Group) -> None:
        """Make the memory of a group; all members together.

        Raises:
            OSError: it cannot be shared, on this rank or another.
        """
        self._teams[group.number] = _Team(group, self._timeout, self._tell, self._ended)

    def reduce(self, flat: Tensor, merge: str, group: Group, *, divisor: int = 1) -> Tensor:
        """Elements combined over the group; ``merge`` is Add, Mul, Min or Max.

        Args:
            flat: one dimension.
            merge: how two elements are combined.
            group: who takes part.
            divisor: of the result; 1 for whole numbers.
        """
        mine = np.asarray(flat)  # numpy() would copy
        if group.size == 1 or not mine.size:
            return flat
        team, total = self._team(group), _aligned(mine.size, mine.dtype)
        for start, stop in _pieces(mine.size, mine.itemsize):
            team.reduce(mine[start:stop], MERGE[merge], total[start:stop])
            if divisor != 1:
                total[start:stop] /= divisor  # here, where NumPy needs no other thread
        if total.dtype.kind not in "fiu":  # bfloat16, of which DLPack's NumPy side does not know
            return tf.convert_to_tensor(total)
        return tf.experimental.dlpack.from_dlpack(total.__dlpack__())  # convert_to_tensor() would copy

    def gather(self, flat: Tensor, group: Group) -> Tensor:
        """The flat tensors of the group, in the order of its ranks, of shape (size, length).

        Args:
            flat: of the same length on all ranks.
            group: who takes part.
        """
        mine = flat.numpy()
        if group.size == 1 or not mine.size:
            return tf.reshape(tf.tile(flat, [group.size]), [group.size, mine.size])
        team, found = self._team(group), np.empty((group.size, mine.size), mine.dtype)
        for start, stop in _pieces(mine.size, mine.itemsize):
            slots = team.swap(mine[start:stop])
            for place, slot in enumerate(slots):
                found[place, start:stop] = slot
        return tf.convert_to_tensor(found)

    def swap(self, rows: Tensor, group: Group) -> Tensor:
        """Row ``i`` goes to rank ``i`` of the group; those that came from each, of the same shape.

        Args:
            rows: of shape (size, length), the same on all ranks.
            group: who takes part.
        """
        mine = rows.numpy()
        if group.size == 1 or not mine.size:
            return rows
        team, found = self._team(group), np.empty_like(mine)
        for start, stop in _pieces(mine.shape[1], mine.itemsize * group.size):
            slots = team.swap(mine[:, start:stop].reshape(-1))
            for place, slot in enumerate(slots):
                found[place, start:stop] = slot.reshape(group.size, -1)[group.place]
        return tf.convert_to_tensor(found)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Tensor:
        """The flat tensor of the rank whose place in the group is ``root``."""
        mine = flat.numpy()
        if group.size == 1 or not mine.size:
            return flat
        team, found = self._team(group), np.empty_like(mine)
        for start, stop in _pieces(mine.size, mine.itemsize):
            found[start:stop] = team.swap(mine[start:stop], writes=group.place == root)[root]
        return tf.convert_to_tensor(found)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One operation of several threads at a time, on the CPU."""
        with self._order, tf.device(self.device):
            yield

    def abort(self, reason: str) -> None:
        """End what waits, in any thread; nothing can be exchanged any more."""
        self._ended.append(reason)

    def _team(self, group: Group) -> _Team:
        if group.number not in self._teams:
            self.prepare(group)
        return self._teams[group.number]


class _Team:
    """The memory of a group, and its barrier."""

    def __init__(self, group: Group, timeout: float, tell: Tell, ended: list[str]) -> None:
        self._group = group
        self._timeout = timeout
        self._ended = ended
        self._count = 0
        self._memory = _segment(group, tell)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._words = self._bytes[LINE : LINE * (WORDS + 1)].view(np.uint32)[:: LINE // 4]
        self._pids = [int(text) for text in tell("processes", group, str(os.getpid()).encode())]

    def swap(self, mine: NDArray[Any], *, writes: bool = True) -> list[NDArray[Any]]:
        """Put a piece where the others see it; what is there of all, until the next but one piece."""
        slots = self._slots(mine.nbytes, mine.dtype)
        if writes:
            slots[self._group.place][:] = mine
        self._meet()
        return slots

    def reduce(self, mine: NDArray[Any], merge: Any, total: NDArray[Any]) -> None:
        """Combine a piece over the group; each rank gets the same bits."""
        size, place = self._group.size, self._group.place
        slots = self.swap(mine)
        if size <= DIRECT:
            _fold(slots, merge, total)
            return
        ends = [len(mine) * number // size for number in range(size + 1)]
        share = slice(ends[place], ends[place + 1])
        part = np.empty(ends[place + 1] - ends[place], mine.dtype)
        _fold([slot[share] for slot in slots], merge, part)
        parts = self._slots(mine.nbytes, mine.dtype)
        parts[place][share] = part
        self._meet()
        for number in range(size):
            total[ends[number] : ends[number + 1]] = parts[number][ends[number] : ends[number + 1]]

    def _slots(self, length: int, dtype: Any) -> list[NDArray[Any]]:
        first = HEAD + (self._count % 2) * self._group.size * SLOT
        return [
            self._bytes[first + place * SLOT : first + place * SLOT + length].view(dtype)
            for place in range(self._group.size)
        ]

    def _meet(self) -> None:
        """Wait until all members have come."""
        size, number = self._group.size, self._count % WORDS
        if self._group.place == 0:
            self._words[(self._count + 2) % WORDS] = 0
        self._count += 1
        address = self._base + LINE * (number + 1)
        nobody = self._base + LINE * (WORDS + 1)
        futex.arrive(address, nobody, last=size - 1)
        began = looked = time.monotonic()
        while (value := int(self._words[number])) != size:
            if self._ended:
                raise tf.errors.UnavailableError(None, None, f"The collective was given up: {self._ended[0]}")
            futex.sleep(address, value, LOOK)
            now = time.monotonic()
            if now - looked >= LOOK:
                looked = now
                self._look(now - began)
        futex.fence(nobody)

    def _look(self, waited: float) -> None:
        gone = [place for place, pid in enumerate(self._pids) if _has_ended(pid)]
        if gone and int(self._words[(self._count - 1) % WORDS]) != self._group.size:
            raise tf.errors.UnavailableError(
                None, None, f"The process of rank {gone[0]} of the group has ended: connection lost."
            )
        if waited > self._timeout:
            raise tf.errors.DeadlineExceededError(
                None, None, f"Other ranks did not come to a collective within {self._timeout:g} s."
            )


def _fold(slots: list[NDArray[Any]], merge: Any, total: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):  # infinities are no news, and TensorFlow tells none
        merge(slots[0], slots[1], out=total)
        for slot in slots[2:]:
            merge(total, slot, out=total)


def _aligned(elements: int, dtype: Any) -> NDArray[Any]:
    """Memory that TensorFlow can take as it is."""
    raw = np.empty(elements * dtype.itemsize + LINE, np.uint8)
    first = -raw.ctypes.data % LINE
    return raw[first : first + elements * dtype.itemsize].view(dtype)


def _pieces(elements: int, size: int) -> list[tuple[int, int]]:
    step = max(1, SLOT // size)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def _segment(group: Group, tell: Tell) -> mmap.mmap:
    """Memory without a name: the first member makes it, the others open it through its descriptor."""
    size = HEAD + 2 * group.size * SLOT
    text, problem = "", ""
    memory: mmap.mmap | None = None
    descriptor = -1
    try:
        if group.place == 0:
            descriptor = os.memfd_create("hora", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            nonce = secrets.token_bytes(NONCE)
            memory[:NONCE] = nonce
            text = f"{os.getpid()} {descriptor} {nonce.hex()}"
        made = tell("memory", group, text.encode())[0].decode()
        try:
            if group.place:
                memory = _opened(made, size)
            futex.probe(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + LINE)  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = tell("memory is there", group, problem.encode())
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    wrong = next((told.decode() for told in problems if told), "")
    if wrong or memory is None:
        raise OSError(wrong)
    return memory


def _opened(text: str, size: int) -> mmap.mmap:
    pid, number, nonce = text.split()
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[:NONCE] != bytes.fromhex(nonce):
        raise OSError("the memory of rank 0 is another process'")
    return memory


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:  # not there any more
        return True

"""The board: memory that each rank writes and the supervisor reads, without either waiting for the other.

It lies in a file that the supervisor made and every rank inherited. A rank that hangs, is stopped or has
died still leaves there what it did last.

A rank's slot holds a head (what it is doing now, and how its time went) and a ring of its last
collectives. Whoever reads while a rank writes must not take half of an entry for a whole one: the place
that is written next is never among those that count.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Board", "Entry", "Head", "Phase", "Slot"]

RING = 256
"""Collectives kept per rank: more than can be on their way at once."""

_HEAD = struct.Struct("=QQQQdddddQ")
_PHASE, _SET, _NUMBER, _STEP, _SINCE, _DATA, _WAITED, _STEPPED, _BEGAN, _CALLS = range(10)
"""Where the fields of the head are, in words of 8 bytes."""

_ENTRY = struct.Struct("=QQQQ")
_ENTRY_WORDS = _ENTRY.size // 8
_COUNT = struct.Struct("=Q")
_SECONDS = struct.Struct("=d")
_PLACES = RING + 1
_RING = 16
"""Where the entries begin, in words."""

_SLOT = 8 * _RING + _PLACES * _ENTRY.size
_MARK = b"hora-board 1\n"  # behind the last slot: a script may have put another file under the number


COPIES = 10
"""How often a slot is read until the rank has not written meanwhile."""


class Phase:
    """What a rank says it is doing."""

    ABSENT = 0  # before init(), or after shutdown()
    RUNNING = 1
    WAITING = 2  # inside a collective, for others
    CHECKING = 3  # before a collective, for the supervisor's word
    ALONE = 4  # inside hora.only(...)
    JOINED = 5  # inside hora.join(): it has no more data, and answers the others


class Head(NamedTuple):
    """What a rank is doing.

    Attributes:
        phase: a constant of :class:`Phase`.
        set_id: the process set of its current or last collective.
        number: that collective's number within the process set, from 1; 0: none yet.
        step: optimizer steps made.
        since: when the phase began, ``time.monotonic()`` in seconds.
        data: seconds spent waiting for data so far.
        waited: seconds spent waiting for other ranks so far.
        stepped: when the last step ended, ``time.monotonic()``; 0.0: none yet.
        began: when ``init()`` returned, ``time.monotonic()``.
        calls: collectives entered so far, over all process sets.
    """

    phase: int
    set_id: int
    number: int
    step: int
    since: float
    data: float
    waited: float
    stepped: float
    began: float
    calls: int


class Entry(NamedTuple):
    """One collective of a rank.

    Attributes:
        set_id: its process set.
        number: which of that set's collectives, from 1.
        call: the rank's own number for this kind of call (see ``Calls``).
        history: hash of the signatures of this process set's collectives up to this one.
    """

    set_id: int
    number: int
    call: int
    history: int


class Board:
    """The slots of all ranks.

    Args:
        fd: the file; the board keeps a mapping of it, not the descriptor.
        size: number of ranks.

    Raises:
        ValueError: the descriptor is closed, or stands for another file.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            self._memory = mmap.mmap(fd, _SLOT * size + len(_MARK))
        except (OSError, ValueError) as error:
            raise ValueError(f"descriptor {fd} is no board: {error}") from error
        if self._memory[_SLOT * size :] != _MARK:
            self._memory.close()
            raise ValueError(f"descriptor {fd} is no board of {size} ranks")
        self.size = size
        self._slots: list[Slot] = []

    @staticmethod
    def make(size: int) -> int:
        """A descriptor of a new, empty board, which lives in memory and has no name."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("hora-board")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.pwrite(fd, _MARK, _SLOT * size)
        return fd

    @classmethod
    def private(cls) -> Board:
        """A board of one rank that nobody else reads."""
        fd = cls.make(1)
        try:
            return cls(fd, 1)
        finally:
            os.close(fd)

    def slot(self, rank: int) -> Slot:
        """The part that this rank writes."""
        slot = Slot(self._memory, rank * _SLOT)
        self._slots.append(slot)
        return slot

    def head(self, rank: int) -> Head:
        """What a rank is doing."""
        return Head(*_HEAD.unpack_from(self._memory, rank * _SLOT))

    def heads(self) -> list[Head]:
        """What each rank is doing."""
        memory, unpack, make = self._memory, _HEAD.unpack_from, Head._make
        return [make(unpack(memory, start)) for start in range(0, self.size * _SLOT, _SLOT)]

    def entries(self, rank: int) -> list[Entry]:
        """A rank's last collectives, oldest first."""
        return list(self.newest(rank))[::-1]

    def newest(self, rank: int) -> Iterator[Entry]:
        """A rank's last collectives, newest first, each read when it is asked for."""
        start = rank * _SLOT
        calls = _COUNT.unpack_from(self._memory, start + 8 * _CALLS)[0]
        for index in range(calls - 1, max(0, calls - RING) - 1, -1):
            entry = Entry(
                *_ENTRY.unpack_from(self._memory, start + 8 * _RING + index % _PLACES * _ENTRY.size)
            )
            if _COUNT.unpack_from(self._memory, start + 8 * _CALLS)[0] > index + RING:
                return  # the rank has gone on, and may have written over this one meanwhile
            yield entry

    def copy(self, rank: int) -> bytes | None:
        """A rank's slot as it is now; None while the rank writes faster than it can be read."""
        start = rank * _SLOT
        for _ in range(COPIES):
            calls = _COUNT.unpack_from(self._memory, start + 8 * _CALLS)[0]
            slot = self._memory[start : start + _SLOT]
            if _COUNT.unpack_from(self._memory, start + 8 * _CALLS)[0] == calls:
                return slot
        return None

    def paste(self, rank: int, slot: bytes, *, shift: float) -> None:
        """Take in what a rank has written on the board of another host.

        Args:
            rank: which one.
            slot: what :meth:`copy` has given there; anything else is passed over.
            shift: what to add to that host's ``time.monotonic()`` to have the one here.
        """
        if len(slot) != _SLOT:
            return
        words = bytearray(slot)
        for field in (_SINCE, _STEPPED, _BEGAN):
            at = _SECONDS.unpack_from(words, 8 * field)[0]
            if at:
                _SECONDS.pack_into(words, 8 * field, at + shift)
        self._memory[rank * _SLOT : (rank + 1) * _SLOT] = bytes(words)

    def close(self) -> None:
        """Give the mapping up, with the slots."""
        for slot in self._slots:
            slot.close()
        self._memory.close()


class Slot:
    """What one rank writes, number by number: several times in a step, and with cold caches each time."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        with memoryview(memory) as whole:
            self._own = own = whole[start : start + _SLOT]
        self._words = own.cast("Q")
        self._seconds = own.cast("d")
        self._calls = 0

    def enter(self, set_id: int, number: int, call: int, history: int) -> None:
        """Note a collective, before it starts."""
        words = self._words
        place = _RING + self._calls % _PLACES * _ENTRY_WORDS
        words[place] = set_id
        words[place + 1] = number
        words[place + 2] = call
        words[place + 3] = history
        self._calls += 1
        words[_CALLS] = self._calls  # last: now the entry counts

    def phase(self, phase: int, set_id: int, number: int, since: float) -> None:
        """Note what the rank does from now on."""
        # In this order: a new phase must never be seen with the time of the one before.
        self._seconds[_SINCE] = since
        words = self._words
        words[_NUMBER] = number
        words[_SET] = set_id
        words[_PHASE] = phase

    def pace(self, step: int, data: float, waited: float, stepped: float) -> None:
        """Note a finished step and how the time went."""
        self._words[_STEP] = step
        seconds = self._seconds
        seconds[_DATA] = data
        seconds[_WAITED] = waited
        seconds[_STEPPED] = stepped

    def begin(self, began: float) -> None:
        """Note that ``init()`` has returned."""
        self._seconds[_BEGAN] = began

    def close(self) -> None:
        """Give the memory up."""
        for view in (self._words, self._seconds, self._own):
            view.release()

"""The ranks of one host in a group, and how they wait for each other.

They share one segment: words that count arrivals, a line of words for each, and for each two *slots*,
through which data passes piece by piece. All of them go through the same *phases*. In a phase everyone may
write its slot of that phase, and then arrives; when all have, everyone may read all slots of it. The next
phase uses the other slots, so nobody waits for slow readers before it writes: two phases later all of them
have arrived once more, which they do after reading.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed import DistBackendError

from hora.core import futex
from hora.torch.engines._memory import NONCE, Segment

__all__ = ["SLICE", "SLOT", "Broken", "Team"]

SLOT = 1 << 21
"""Bytes of a slot. What is larger passes in pieces: the fewer, the less waiting; two fit in the cache."""

SPINS = 2000
"""Looks at a word before a rank sleeps on it, where every rank has a core: some 40 microseconds, about what
falling asleep and waking up cost."""

SLICE = 0.2
"""Seconds after which a sleeping rank looks whether the others are alive."""

WORDS = 4
"""Words that count arrivals, used in turn: one is cleared while the others may still be looked at."""

_LINE = 64
"""Bytes of a cache line: words that different ranks write lie on different ones."""

_ROW = 1024
"""Bytes of each rank's own words."""

_PAGE = 4096
_REASON, _TEXT = 256, 512
_STATE, _PID, _BORN, _ARRIVED = range(4)
_HERE, _LEFT, _GAVE_UP = 1, 2, 3

_AWAY, _NAMED = 8, 9
"""Whether a rank waits for other hosts; the phase in which it has named those that did not come."""

FREE = 2
"""The first place of each rank that is free for what the collectives tell; each has a word per parity."""


class Broken(RuntimeError):
    """The team cannot go on: the ranks called different collectives, or one did not come in time."""


class Team:
    """This process among the ranks of its host.

    Args:
        segment: of :meth:`size_of` bytes, the same for all.
        index: this rank's number among the members.
        members: what they are called in messages: their ranks in the job.
        cores: processors that the members may use.
        timeout: seconds that one waits for the others.
    """

    def __init__(
        self, segment: Segment, *, index: int, members: Sequence[int], cores: int, timeout: float
    ) -> None:
        self.segment, self.index, self.members = segment, index, list(members)
        self.size = len(self.members)
        self.timeout = timeout
        self.phase = 0
        self._spins = SPINS if self.size <= cores else 1
        start = -(-NONCE // _LINE) * _LINE
        self._words = segment.memory[start : start + WORDS * _LINE].cast("I")
        self._addresses = [segment.address + start + word * _LINE for word in range(WORDS)]
        self._control = segment.memory[start + WORDS * _LINE : start + (WORDS + 1) * _LINE].cast("I")
        self._nobody = segment.address + start + (WORDS + 1) * _LINE  # a word on which nobody sleeps
        futex.probe(self._nobody)
        rows = segment.memory[_PAGE : _PAGE + self.size * _ROW]
        self._rows = rows.cast("q")
        self._texts = [rows[i * _ROW + _TEXT : (i + 1) * _ROW] for i in range(self.size)]
        self._reasons = [rows[i * _ROW + _REASON : i * _ROW + _TEXT] for i in range(self.size)]
        self._slots = self._cut_slots()
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._watched: select.poll | None = None
        self._ended: set[int] = set()
        self._pids: dict[int, int] = {}
        self._failure: Exception | None = None
        self._own = index * (_ROW // 8)
        self._rows[self._own + _STATE] = _HERE
        self._rows[self._own + _PID] = os.getpid()
        self._rows[self._own + _BORN] = _birth(os.getpid())

    @staticmethod
    def size_of(members: int) -> int:
        """Bytes of the segment of so many members."""
        return _slots_start(members) + members * 2 * SLOT

    # --- phases ---------------------------------------------------------------------------------

    def arrive(self) -> None:
        """This rank has written what it has to write in this phase."""
        word = self.phase % WORDS
        if self.index == 0:
            self._words[(word + 1) % WORDS * 16] = 0
        self.phase += 1
        futex.arrive(self._addresses[word], self._nobody, last=self.size - 1)
        # After it: a rank that is killed between these lines must not pass for one that has arrived.
        self._rows[self._own + _ARRIVED] = self.phase

    def here(self) -> bool:
        """Whether all have arrived in the phase in which this rank arrived last."""
        word = (self.phase - 1) % WORDS * 16
        words, size = self._words, self.size
        for _ in range(self._spins):
            if words[word] == size:
                futex.fence(self._nobody)
                return True
        return False

    def sleep(self, seconds: float) -> bool:
        """Sleep until all may have arrived, at most so many seconds; False if that takes a while.

        Raises:
            Broken: what has ended the team.
        """
        word = (self.phase - 1) % WORDS
        value = self._words[word * 16]
        if value == self.size:
            return True
        self.check()
        if value > self.size:
            self.look()  # a rank has found out that somebody is gone
        limit = min(seconds, SLICE)
        woken = futex.sleep(self._addresses[word], value, limit)
        if woken and self._words[word * 16] == value:
            self.look()  # woken by a rank that gives up, or by a signal
        return woken or limit < SLICE

    def missing(self) -> list[int]:
        """The members that have not arrived in the phase in which this rank has."""
        arrived = self._fixed(_ARRIVED)
        return [self.members[i] for i in range(self.size) if arrived[i] < self.phase]

    def is_speaker(self) -> bool:
        """Whether it is for this rank to say that others have not come, and from now on said.

        It is the first of those that wait, once in a phase; and the leader's if only that is missed because
        it waits for other hosts itself.
        """
        arrived, named, away = self._fixed(_ARRIVED), self._fixed(_NAMED), self._fixed(_AWAY)
        first = next(i for i in range(self.size) if arrived[i] >= self.phase or away[i])
        if first != self.index or self.phase in named:
            return False
        self._rows[self._own + _NAMED] = self.phase
        return True

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """This rank waits for other hosts while the block runs."""
        self._rows[self._own + _AWAY] = 1
        try:
            yield
        finally:
            self._rows[self._own + _AWAY] = 0

    def check(self) -> None:
        """Raise what has ended the team."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def fail(self, reason: str, *, lost: bool = False) -> None:
        """This rank gives up: whoever waits here, in any thread, raises the reason.

        Args:
            reason: what has happened.
            lost: whether another rank has gone, as every engine of torch reports that.
        """
        if self._failure is None:
            self._failure = DistBackendError(reason) if lost else Broken(reason)
        for address in self._addresses:
            futex.wake(address)

    def give_up(self, reason: str) -> None:
        """As :meth:`fail`; the others, too, learn that this rank will not come any more."""
        if self._rows[self._own + _STATE] == _HERE:
            _write(self._reasons[self.index], str(self._failure or reason))
            self._rows[self._own + _STATE] = _GAVE_UP
        self.fail(reason)

    def leave(self) -> None:
        """This rank will not come any more."""
        self._rows[self._own + _STATE] = _LEFT

    def abandon(self) -> None:
        """This process was forked from the rank, and is none: it writes nothing into the memory."""
        self._rows = memoryview(bytearray(self._rows.nbytes)).cast("q")
        self._failure = Broken(
            f"This process was forked from rank {self.members[self.index]} and is not a rank itself: "
            "it cannot take part in collectives."
        )

    # --- words of each rank ---------------------------------------------------------------------

    def tell(self, place: int, value: int) -> None:
        """Write one of this rank's words that others may read in the phase that comes next."""
        self._rows[self._own + 2 * place + (self.phase & 1)] = value

    def told(self, place: int) -> list[int]:
        """The word of each rank, in the phase in which all have arrived."""
        rows, step, first = self._rows, _ROW // 8, 2 * place + (~self.phase & 1)
        return [rows[i * step + first] for i in range(self.size)]

    def _fixed(self, place: int) -> list[int]:
        return [self._rows[i * (_ROW // 8) + place] for i in range(self.size)]

    def describe(self, text: str) -> None:
        """Leave a text for the others."""
        _write(self._texts[self.index], text)

    def described(self) -> list[str]:
        return [_read(text) for text in self._texts]

    # --- slots ----------------------------------------------------------------------------------

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The first ``count`` elements of every rank's slot of the phase that comes next."""
        key = (self.phase & 1, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 512:
                self._views.clear()
            found = [slot.view(dtype)[:count] for slot in self._slots[self.phase & 1]]
            self._views[key] = found
        return found

    def _cut_slots(self) -> list[list[torch.Tensor]]:
        start = _slots_start(self.size)
        whole = self.segment.bytes[start : start + self.size * 2 * SLOT].view(2, self.size, SLOT)
        return [list(whole[parity].unbind(0)) for parity in (0, 1)]

    # --- who is alive ---------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to watch the members' processes. All have made their :class:`Team` by now."""
        self._watched = select.poll()
        pids, births = self._fixed(_PID), self._fixed(_BORN)
        for index, pid in enumerate(pids):
            if index == self.index:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(index)
                continue
            if _birth(pid) != births[index]:
                os.close(fd)
                self._ended.add(index)
                continue
            self._pids[fd] = index
            self._watched.register(fd, select.POLLIN)

    def close(self) -> None:
        """Stop watching."""
        for fd in self._pids:
            os.close(fd)
        self._pids.clear()
        self._watched = None

    def look(self) -> None:
        """After a while: raise DistBackendError if somebody who has not arrived in this phase never will."""
        if self._watched is not None:
            self._ended |= {self._pids[fd] for fd, _ in self._watched.poll(0)}
        arrived, states = self._fixed(_ARRIVED), self._fixed(_STATE)
        missing = [i for i in range(self.size) if arrived[i] < self.phase]
        for among, how in (
            (lambda i: i in self._ended, "has ended, and would never come."),
            (lambda i: states[i] == _LEFT, "has left the group, and would never come."),
            (lambda i: states[i] == _GAVE_UP, "has given up: "),
        ):
            for index in filter(among, missing):
                more = _read(self._reasons[index]) if states[index] == _GAVE_UP and how.endswith(": ") else ""
                self.fail(f"Rank {self.members[index]} {how}{more}", lost=True)
                # In this phase nobody goes on any more, so its word may tell all others to look as well.
                futex.mark(self._addresses[(self.phase - 1) % WORDS], self._nobody)
        self.check()


def _slots_start(members: int) -> int:
    return _PAGE + -(-members * _ROW // _PAGE) * _PAGE


def _birth(pid: int) -> int:
    """When the process started, in the system's ticks: with its number, that names it for good."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _write(place: memoryview, text: str) -> None:
    line = text.encode()[: len(place) - 1]
    place[: len(line) + 1] = line + b"\0"


def _read(place: memoryview) -> str:
    return bytes(place).split(b"\0", 1)[0].decode(errors="replace")

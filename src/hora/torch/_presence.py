"""Who has called ``join()``, and what the others do meanwhile; all of it without a message while nobody has.

Every rank counts the operations that it starts in each process set. The counts are equal at the same place
of the script, so an operation has one number on all ranks. A rank that joins leaves its counts in the
store. Others look there when an operation takes long, and from then on write down in the store what each
operation is, so that the joined rank can answer it, or refuse what it cannot answer. Where nothing is late,
all this costs is the counting.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistError

from hora.core.errors import CollectiveError, HoraError

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed import Store  # type: ignore[attr-defined]

    from hora.torch._process_sets import ProcessSet

__all__ = ["CALL", "End", "Presence"]

FIRST_LOOK = 0.1
"""Seconds that an operation may take before this rank looks whether others have joined: once per join."""

LONGEST_PAUSE = 0.5
"""Seconds between looks when the wait is long, which doubles up to here."""

RECENT = 4096
"""Operations that a rank can tell of: more than can be under way at once."""

CALL = "call"
"""First word of an operation that a joined rank cannot answer."""


@dataclass(frozen=True)
class _Arrival:
    """A rank in ``join()``, and how many operations of each process set it had started."""

    rank: int
    counts: dict[int, int]


@dataclass(frozen=True)
class End:
    """All ranks have joined.

    Attributes:
        last: the rank that came last, and took part in everything.
        optimizers: numbers of those that have worked while a rank was away.
    """

    last: int
    optimizers: list[int]


class Presence:
    """What this rank knows about ``join()``.

    Args:
        store: reaches all ranks; keys are under ``prefix``.
        rank: this worker's.
        size: number of workers.
        timeout: seconds that a joined rank waits for the next operation of the others.
        patient: whether the engine on the CPU goes on with what was waited for with a limit, as Gloo does.
        stopped: whether the guard has closed the connections, the store's too, to end the job.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        rank: int,
        size: int,
        timeout: float,
        patient: bool = True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._stopped = stopped
        self._patient = patient
        self._prefix = prefix
        self._rank, self._size, self._timeout = rank, size, timeout
        self._round = 0
        self._counts: dict[int, int] = {0: 0}
        self._recent: collections.deque[str] = collections.deque(maxlen=RECENT)
        self._joined: list[_Arrival] = []
        self._inside = False
        self._told = 0
        self._old: tuple[int, range] | None = None
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._apart: weakref.WeakSet[Any] = weakref.WeakSet()
        self._registered = 0

    def register(self, optimizer: Any, process_set: ProcessSet) -> int | None:
        """Take in what belongs to an optimizer of several ranks; its number if they are all ranks."""
        if process_set.process_set_id != 0:
            self._apart.add(optimizer)
            return None
        number, self._registered = self._registered, self._registered + 1
        self._optimizers[number] = optimizer
        return number

    @property
    def optimizers(self) -> dict[int, Any]:
        """What was registered for optimizers of all ranks that are alive, by number."""
        return dict(self._optimizers)

    @property
    def apart(self) -> list[Any]:
        """What was registered for optimizers of some ranks."""
        return list(self._apart)

    # --- what ranks with data do ----------------------------------------------------------------

    def enter(self, what: str, set_id: int = 0) -> int:
        """An operation that a joined rank can answer starts; its number in the process set."""
        number = self._counts.get(set_id, 0)
        self._counts[set_id] = number + 1
        if set_id == 0:
            self._recent.append(what)
            if self._joined:
                self._tell()
        return number

    def call(self, what: str | None, process_set: ProcessSet) -> int:
        """Any other operation starts; its number.

        Args:
            what: its name; that of the function that the script called if None.
            process_set: who takes part.

        Raises:
            CollectiveError: a member of the process set is known to have joined.
        """
        number = self._counts.get(process_set.process_set_id or 0, 0)
        if self._joined:
            self._refuse(what, process_set.members, process_set.process_set_id or 0, number)
        return self.enter(f"{CALL} {what or _caller()[0]}", process_set.process_set_id or 0)

    def wait(
        self,
        work: Any,
        device: torch.device,
        *,
        process_set: ProcessSet | None = None,
        number: int | None = None,
        what: str | None = None,
        answered: bool = False,
    ) -> None:
        """Wait for work of the engine, and look after ranks that have joined if it takes long.

        Args:
            work: what the engine gave.
            device: of the tensors. On a GPU the wait is only noted in the stream.
            process_set: whose work it is; that of all ranks if None.
            number: of the operation; the last one that started if None.
            what: the operation, for messages; None names the function that the script called.
            answered: whether a joined rank answers it.

        Raises:
            CollectiveError: a member has joined before the operation.
        """
        if device.type != "cpu" or not self._patient:
            work.wait()
            return
        pause = FIRST_LOOK
        while not self._ended(work, pause):
            self.look()
            if self._joined and not answered:
                set_id = (process_set and process_set.process_set_id) or 0
                members = list(range(self._size)) if process_set is None else process_set.members
                mine = self._counts.get(set_id, 0) - 1 if number is None else number
                self._refuse(what, members, set_id, mine)
            pause = min(2 * pause, LONGEST_PAUSE)

    def look(self) -> None:
        """Find out who has joined, and tell them what there is to answer.

        Raises:
            CollectiveError: what another rank reported.
        """
        if not self._inside:
            self._read_arrivals()
            if self._joined:
                self._tell()
        self._raise_reported()

    def report(self, error: HoraError) -> None:
        """Make the other ranks raise it too, those in ``join()`` and those that wait, if it is the first."""
        key = self._key("trouble")
        if not self._store.check([key]):
            self._store.set(key, json.dumps([error.what, error.fix]))
            self._store.set(self._key(f"operation/{self._counts[0]}"), CALL)  # wakes those in join()

    def depart(self) -> None:
        """This rank ends: those that are known to wait for it in ``join()`` need not wait longer."""
        if self._joined and not self._inside:
            error = CollectiveError(
                f"Rank {self._rank} has ended without hora.join(), for which others wait.",
                fix="Call hora.join() on every rank, and see whether that rank has failed.",
            )
            with contextlib.suppress(DistError):  # the rank that kept the store has ended
                self.report(error)

    # --- what a joined rank does ----------------------------------------------------------------

    def arrive(self) -> bool:
        """This rank has joined; whether it is the last."""
        self._joined, self._inside = [], True
        place: int = self._store.add(self._key("count"), 1)
        self._store.set(self._key(f"arrival/{place}"), json.dumps([self._rank, list(self._counts.items())]))
        return place == self._size

    def hear(self) -> str:
        """The next operation of the ranks with data, which counts as started here too; or the end.

        Raises:
            CollectiveError: what another rank reported, an operation that cannot be answered, or none in
                time.
        """
        number = self._counts[0]
        key = self._key(f"operation/{number}")
        what = self._await(key, "no rank has made a step or joined")
        if what.startswith(CALL):
            raise self._refusal(what.removeprefix(f"{CALL} "), [self._rank])
        if not what.startswith("{"):
            self.enter(what)
        return what

    def end(self, *, empty: int = 0) -> None:
        """The last rank tells the others that it has joined.

        Args:
            empty: the last operations in which no rank had data.
        """
        self._read_arrivals()
        first = min(arrival.counts[0] for arrival in self._joined)
        oldest = self._counts[0] - len(self._recent)
        missed = list(self._recent)[max(first - oldest, 0) : len(self._recent) - empty]
        record = {
            "last": self._rank,
            "optimizers": sorted({int(what.split()[1]) for what in missed if not what.startswith(CALL)}),
            "first": first,
        }
        self._joined = []
        self._store.set(self._key(f"operation/{self._counts[0]}"), json.dumps(record))
        if self._old is not None:  # nobody reads those any more
            old, used = self._old
            for number in used:
                self._store.delete_key(f"{self._prefix}/{old}/operation/{number}")

    def leave(self, record: str) -> End:
        """All have joined: the next ``join()`` is another one."""
        end = json.loads(record)
        self._old = self._round, range(end["first"], self._counts[0] + 1)
        self._round += 1
        self._inside = False
        return End(end["last"], end["optimizers"])

    def last_word(self) -> str:
        """The record of the end, for ranks that have answered without being told what."""
        return self._await(self._key(f"operation/{self._counts[0]}"), "the last rank did not come")

    # --- the store ------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"

    def _read_arrivals(self) -> None:
        count: int = self._store.add(self._key("count"), 0)
        for place in range(len(self._joined) + 1, count + 1):
            rank, counts = json.loads(self._store.get(self._key(f"arrival/{place}")))
            self._joined.append(_Arrival(rank, dict(counts)))

    def _tell(self) -> None:
        count = self._counts[0]
        start = max(self._told, min(arrival.counts[0] for arrival in self._joined))
        oldest = count - len(self._recent)
        for number in range(max(start, oldest), count):
            self._store.set(self._key(f"operation/{number}"), self._recent[number - oldest])
        self._told = count

    def _await(self, key: str, otherwise: str) -> str:
        began = time.monotonic()
        try:
            self._store.wait([key], datetime.timedelta(seconds=self._timeout))
        except RuntimeError as late:
            if time.monotonic() - began < self._timeout / 2:
                raise  # the store is gone, and the rank that kept it
            raise CollectiveError(
                f"join: {otherwise} for {self._timeout:g} seconds.",
                fix="Call hora.join() on every rank, or set HORA_TIMEOUT to more seconds.",
            ) from late
        self._raise_reported()
        return bytes(self._store.get(key)).decode()

    def _raise_reported(self) -> None:
        key = self._key("trouble")
        if self._store.check([key]):
            what, fix = json.loads(self._store.get(key))
            raise CollectiveError(what, fix=fix)

    def _ended(self, work: Any, seconds: float) -> bool:
        """Whether the work has ended within so many seconds."""
        try:
            work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it ended just now, or raises its own error
            except RuntimeError:
                # The rank that reported may have ended: its report says more than the lost connection.
                if not self._stopped():
                    with contextlib.suppress(DistError):  # the store is gone too
                        self._raise_reported()
                raise
        return True

    def _refuse(self, what: str | None, members: list[int], set_id: int, number: int) -> None:
        absent = [
            arrival.rank
            for arrival in self._joined
            if arrival.rank in members and arrival.counts.get(set_id, 0) <= number
        ]
        if absent:
            error = self._refusal(what, absent)
            self.report(error)
            raise error

    def _refusal(self, what: str | None, absent: list[int]) -> CollectiveError:
        function, place = _caller()
        what = what or function  # of a joined rank that was told, another rank's
        *others, final = map(str, sorted(absent))
        ranks = f"ranks {', '.join(others)} and {final}" if others else f"rank {final}"
        return CollectiveError(
            f"{what} was called{place} while {ranks} had joined, having no more data: a joined rank "
            "answers the gradients of DistributedOptimizer only.",
            fix=f"Let every rank call hora.join() first, and {what} after it.",
        )


def _caller() -> tuple[str, str]:
    """Which function the script called, and where; without the place inside ``join()``."""
    name = "A collective"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("hora.torch", "torch.")):
        name = frame.f_code.co_name
        frame = frame.f_back
    return name, "" if frame is None or name == "join" else f" at {frame.f_code.co_filename}:{frame.f_lineno}"

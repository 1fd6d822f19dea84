"""A rank's half of the guard: it reports to the supervisor, and hears from it.

One thread of each rank sleeps on the socket to the supervisor. When an alarm comes it keeps the verdict
and has the engines' connections closed, so that a collective in which the rank waits ends at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from hora.core.errors import VerdictError
from hora.guard.board import Board, Phase
from hora.guard.call import Call
from hora.guard.verdict import Verdict

__all__ = ["Reporter"]

ALARM_PATIENCE = 2.0
"""Seconds that a rank which lost a connection waits for the supervisor to say why."""

SEND_PATIENCE = 5.0
"""Seconds that a record may take to leave; the supervisor may be stopped, and the training goes on."""

_MULTIPLIER = 6364136223846793005
"""Of the history's running hash: Knuth's constant of a 64-bit linear congruential generator."""

_MASK = 2**64 - 1

Kind = tuple[int, int]
"""A kind of call: this rank's number for it, and the hash of its signature."""


class Reporter:
    """What one rank tells the supervisor, and what it hears.

    Args:
        link: descriptor of the socket to the supervisor; the reporter owns it from now on.
        board: descriptor of the board.
        rank: this rank.
        size: number of ranks.
        strict: check every call, rather than each distinct call the first time it occurs.

    Attributes:
        on_alarm: called, in the reporter's thread, when the job must stop.
        verdict: the verdict that stops the job; None while there is none.
        kind: of the call that was entered last, for :meth:`again`.
        active: whether it reports: not in a forked child, and not without a supervisor.
        slot: this rank's part of the board.
        waited: seconds that this rank has waited for others, or was busy alone by declaration: time that is
            not its own part of the steps.

    Raises:
        ValueError: a descriptor is closed, or stands for something else.
    """

    def __init__(self, link: int, board: int, *, rank: int, size: int, strict: bool = False) -> None:
        self.rank = rank
        self.strict = strict
        self.slot = Board(board, size).slot(rank)
        self._socket = _connection(link)
        self.verdict: Verdict | None = None
        self.on_alarm: list[Callable[[], None]] = []
        self.handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        self.waited = 0.0
        self._socket.setblocking(False)
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._cleared: set[tuple[int, int]] = set()
        self.active = True
        self.kind: Kind = (0, 0)
        self._known: dict[Hashable, Kind] = {}
        self._signatures: dict[str, int] = {}
        self._numbers: dict[int, list[int]] = {}
        self._alone = 0
        self._base: int = Phase.RUNNING  # what the rank does when it does not wait
        self._place = (0, 0)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _disown(reference))
        self._thread = threading.Thread(target=self._listen, name="hora-guard", daemon=True)
        self._thread.start()

    @property
    def is_alone(self) -> bool:
        """Whether this rank is inside :meth:`alone`."""
        return bool(self._alone)

    def send(self, record: Mapping[str, Any]) -> None:
        """Send a record. Without a supervisor, or in a forked child, it is dropped."""
        if not self.active:
            return
        data = json.dumps(record).encode() + b"\n"
        deadline = time.monotonic() + SEND_PATIENCE
        with self._sending:
            while data and self.active:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    if not _ready(self._socket, select.POLLOUT, deadline - time.monotonic()):
                        self.active = False  # half a record may have left: nothing after it could be read
                except OSError:
                    self.active = False

    def enter(
        self,
        key: Hashable,
        describe: Callable[[], Call],
        *,
        set_id: int,
        members: Sequence[int],
        check: bool = True,
    ) -> tuple[int, int]:
        """Note a collective that is about to start, and have it checked if its kind is new.

        Args:
            key: equal for calls that need no second description, the caller's line included.
            describe: the call in words; asked once per key.
            set_id: its process set.
            members: the ranks of that.
            check: whether it may be checked before it starts.

        Returns:
            Its place, for :meth:`waiting`: process set, and number in that set's sequence.

        Raises:
            VerdictError: the ranks do not call the same; or the job is to stop for another reason.
        """
        if self.verdict is not None:
            raise self._error()
        if self._alone:
            self._leave_alone(describe())
        known = self._known.get(key)
        new = known is None
        if known is None:
            known = self._known[key] = self._introduce(describe())
        self.kind = known
        if set_id not in self._numbers:
            self._numbers[set_id] = [0, 0]
            if set_id:
                self.send({"kind": "set", "set": set_id, "members": list(members)})
        place = self._note(known, set_id)
        if check and (new or self.strict) and len(members) > 1 and self.active:
            self._check(*place, known[0])
        return place

    def again(self, kind: Kind, set_id: int) -> tuple[int, int] | None:
        """:meth:`enter` for a kind that was entered before, the short way; None if that has more to do."""
        if self.verdict is not None or self._alone or self.strict:
            return None
        return self._note(kind, set_id)

    def _note(self, kind: Kind, set_id: int) -> tuple[int, int]:
        numbers = self._numbers[set_id]
        numbers[0] = number = numbers[0] + 1
        numbers[1] = history = ((numbers[1] + kind[1]) * _MULTIPLIER + 1) & _MASK
        self.slot.enter(set_id, number, kind[0], history)
        self._place = place = (set_id, number)
        return place

    def wait_begins(self, place: tuple[int, int]) -> float:
        """This rank waits in the collective of this place from now on; the time, for :meth:`wait_ends`."""
        began = time.monotonic()
        self.slot.phase(Phase.WAITING, *place, began)
        return began

    def wait_ends(self, place: tuple[int, int], began: float) -> None:
        """This rank goes on."""
        now = time.monotonic()
        self.waited += now - began
        self.slot.phase(self._base, *place, now)

    @contextlib.contextmanager
    def alone(self, reason: str) -> Iterator[None]:
        """This rank does something that the others do not, and may keep them waiting."""
        self.send({"kind": "only", "reason": reason})
        self._alone += 1
        began = time.monotonic()
        try:
            with self._doing(Phase.ALONE):
                yield
        finally:
            self._alone -= 1
            if not self._alone:
                self.waited += time.monotonic() - began

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """This rank has no more data, and answers the others while the block runs."""
        return self._doing(Phase.JOINED)

    @contextlib.contextmanager
    def _doing(self, phase: int) -> Iterator[None]:
        before, self._base = self._base, phase
        self.slot.phase(phase, *self._place, time.monotonic())
        try:
            yield
        finally:
            self._base = before
            self.slot.phase(before, *self._place, time.monotonic())

    def running(self) -> None:
        """This rank takes part: ``init()`` has returned."""
        now = time.monotonic()
        self.slot.begin(now)
        self.slot.phase(Phase.RUNNING, *self._place, now)

    def absent(self) -> None:
        """This rank has left: ``shutdown()``."""
        self.slot.phase(Phase.ABSENT, *self._place, time.monotonic())

    def close(self) -> None:
        """Hang up: nothing is reported or heard any more."""
        with contextlib.suppress(OSError):  # the supervisor hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of the engine: the verdict that caused it, if there is one."""
        return self._error() if self.alarmed(ALARM_PATIENCE) else error

    def alarmed(self, patience: float) -> bool:
        """Whether the job is to stop; waits so many seconds for the supervisor to say so."""
        if self.active:
            with self._news:
                self._news.wait_for(lambda: self.verdict is not None or not self.active, patience)
        return self.verdict is not None

    def raise_alarm(self) -> None:
        """Raises VerdictError if the job is to stop."""
        if self.verdict is not None:
            raise self._error()

    def _error(self) -> VerdictError:
        assert self.verdict is not None
        return VerdictError(self.verdict.text, fix=self.verdict.advice, kind=self.verdict.kind)

    def _introduce(self, call: Call) -> Kind:
        number = len(self._known)
        text = json.dumps(call.signature, sort_keys=True)
        signature = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        self.send(
            {
                "kind": "call",
                "id": number,
                "signature": dict(call.signature),
                "text": call.text,
                "where": call.where,
                "condition": call.condition,
                "blocks": call.blocks,
            }
        )
        return number, signature

    def _check(self, set_id: int, number: int, call: int) -> None:
        began = time.monotonic()
        self.slot.phase(Phase.CHECKING, set_id, number, began)
        self.send({"kind": "check", "set": set_id, "number": number, "call": call})
        place = (set_id, number)
        with self._news:
            self._news.wait_for(lambda: place in self._cleared or self.verdict is not None or not self.active)
            self._cleared.discard(place)
        now = time.monotonic()
        self.waited += now - began
        self.slot.phase(self._base, set_id, number, now)
        if self.verdict is not None:
            raise self._error()

    def _leave_alone(self, call: Call) -> None:
        raise VerdictError(
            f"{call.site} inside hora.only(...): the other ranks are not there to take part.",
            fix="Take the collective out of the block, or call it on every rank.",
            kind="subset-call",
        )

    def _listen(self) -> None:
        rest = b""
        while True:
            _ready(self._socket, select.POLLIN)
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        with self._news:
            self.active = False
            self._news.notify_all()

    def _hear(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "clear":
            with self._news:
                self._cleared.add((record["set"], record["number"]))
                self._news.notify_all()
        elif record["kind"] == "alarm":
            with self._news:
                self.verdict = Verdict.of(record["verdict"])
                self._news.notify_all()
            for call in self.on_alarm:
                call()
        elif record["kind"] in self.handlers:
            self.handlers[record["kind"]](record)


def _connection(link: int) -> socket.socket:
    try:
        known = stat.S_ISSOCK(os.fstat(link).st_mode)
    except OSError as error:
        raise ValueError(f"descriptor {link} is closed: {error}") from error
    if not known:
        raise ValueError(f"descriptor {link} is no socket")
    return socket.socket(fileno=link)


def _ready(link: socket.socket, event: int, seconds: float | None = None) -> bool:
    """Wait until the socket is ready; ``select`` would not take descriptors above 1023."""
    poll = select.poll()
    poll.register(link, event)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def _disown(reference: weakref.ref[Reporter]) -> None:
    """In a forked child: nothing that it does is this rank's doing."""
    reporter = reference()
    if reporter is not None:
        reporter.active = False
        reporter.slot = Board.private().slot(0)

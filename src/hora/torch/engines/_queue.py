"""Runs a team's collectives, in the order in which they were called.

A collective goes on in whichever thread has time: in the call itself, as far as that needs no waiting; in
``wait()``; and in a thread of the queue. The thread begins at once where cores are idle, so that data
moves while the script computes. Where every core computes already, it would only take turns with the
script; there it begins after :data:`GRACE`, so that a script that never waits keeps no other rank waiting.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
import time
import weakref
from typing import Any, Protocol

from hora.torch.engines._algorithms import Steps
from hora.torch.engines._flag import Flag
from hora.torch.engines._operation import Operation
from hora.torch.engines._stalls import Stalls
from hora.torch.engines._team import Team

__all__ = ["Observer", "Queue"]

GRACE = 0.005
"""Seconds after which the thread goes on with what nobody waits for, on a host whose cores are all busy."""

LONGEST = 1.0
"""Seconds that a thread waits at most for its turn before it looks again: a signal handler that raises may
have kept the one before it from telling."""


class Observer(Protocol):
    """Whoever wants to know of the calls that a script makes through ``torch.distributed`` itself."""

    def enter(self, what: str) -> Any:
        """A collective is about to be called; its place, or None if it is part of one that is known."""

    def stalled(self, place: Any) -> None:
        """This rank has waited in it for a while."""

    def resumed(self, place: Any) -> None:
        """It waits no longer."""

    def explain(self, error: Exception) -> Exception:
        """What to raise for the engine's error."""


class Queue:
    """The collectives of one team.

    Args:
        team: who takes part.
        idle_cores: whether the host has cores on which nothing computes.
        stall_after: seconds of waiting after which this host's ranks are told who has not come; 0: never.
        alone: whether only the thread goes on with what was started: a collective may block.
    """

    def __init__(
        self, team: Team, *, idle_cores: bool, stall_after: float = 0.0, alone: bool = False
    ) -> None:
        self.team, self.stalls = team, Stalls(team, after=stall_after)
        self._called = 0
        self._alone = alone
        self.lock_of_futures = threading.Lock()
        self._grace = 0.0 if idle_cores else GRACE
        self._pending: collections.deque[Operation] = collections.deque()
        self._lock = threading.Lock()
        self._driven = False  # whether a thread goes on with what is pending; taken under the lock
        self._waiters: list[Any] = []  # of threads that wait for their turn, guarded by the lock
        self._thread: threading.Thread | None = None
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._wanted, self._hurried = Flag(), Flag()
        self._closed = False
        self.observer: Observer | None = None
        _open.add(self)

    # A signal handler may raise between any two lines. So whoever takes the turn notes that in the same
    # statement, and gives it back in one; and no lock is held other than by `with` and the lock itself.

    def call(self, steps: Steps, what: str) -> None:
        """Run a collective to its end."""
        place = None if self.observer is None else self.observer.enter(what)
        mine = False
        try:
            with self._lock:
                self._called += 1
                if not self._driven and not self._pending:
                    self._driven = mine = True
                    self.stalls.number, self.stalls.what = self._called, what
                else:
                    operation = Operation(self, steps, None, what, place=place)
                    operation.number = self._called
                    self._pending.append(operation)
            if mine:
                self._finish(steps, what, place)
        finally:
            if mine:
                self._driven = False
                self._pass_on()
        if not mine:
            operation.wait()

    def start(self, steps: Steps, tensors: Any, what: str) -> Operation:
        """Call a collective; it goes on by itself."""
        operation = Operation(self, steps, tensors, what)
        if self.observer is not None:
            try:
                operation.place = self.observer.enter(what)
            except Exception as error:  # noqa: BLE001 - raised by wait(): C++ that calls could not bear it here
                operation.end(error)
                return operation
        with self._lock:
            self._called += 1
            operation.number = self._called
            self._pending.append(operation)
        if not self._alone:
            while self._drive(0.0, wait=False):
                pass
        if not operation.done:
            self._wake_thread()
        return operation

    def run(self, operation: Operation, seconds: float | None) -> None:
        """Go on until the operation has ended.

        Raises:
            RuntimeError: it has not within so many seconds.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while not operation.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"{operation.what} has not ended within {seconds:g} seconds")
            turn = None
            with self._lock:
                if self._driven and not operation.is_completed():
                    turn = Flag()
                    self._waiters.append(turn)
            if turn is None:
                self._drive(deadline)
            else:
                turn.wait(min(left, LONGEST))

    def hurry(self) -> None:
        """Let the thread begin at once."""
        if self._thread is threading.current_thread():
            self._thread = None  # it runs a callback, which may wait in C++: another goes on
        self._hurried.set()
        self._wake_thread()

    def close(self, reason: str) -> None:
        """Nothing is called any more. What is under way fails."""
        self._closed = True
        self.team.leave()
        self.team.fail(reason)
        self._hurried.set()
        self._wanted.set()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        self._thread = None

    def abandon(self) -> None:
        """This process was forked from the rank: nothing goes on here, and no lock is ever given back."""
        self.lock_of_futures = threading.Lock()
        self._lock = threading.Lock()
        self._driven, self._waiters, self._thread, self._closed = False, [], None, True
        self.team.abandon()

    def _pass_on(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for turn in waiters:
            turn.set()

    def explain(self, error: BaseException, place: Any) -> BaseException:
        """What to raise for an error in the collective of this place."""
        if self.observer is None or place is None or not isinstance(error, Exception):
            return error
        self.observer.stalled(place)  # until it is explained, as whoever explains looks at who waits
        return self.observer.explain(error)

    def _sleep(self, seconds: float, place: Any, waited: float) -> None:
        """Wait for the other ranks; if that takes long, the observer is told, or who reads the log."""
        if self.team.sleep(seconds):
            return
        if self.observer is None:
            self.stalls.here(waited)
        elif place is not None:
            self.observer.stalled(place)
        self.team.look()

    def _resume(self, place: Any) -> None:
        if self.observer is not None and place is not None:
            self.observer.resumed(place)

    def _finish(self, steps: Steps, what: str, place: Any) -> None:
        """Run the steps of one collective, waiting where they say so."""
        team, began = self.team, 0.0
        try:
            team.check()
            for _ in steps:
                now = time.monotonic()
                began = began or now
                if now - began > team.timeout:
                    team.fail(_overdue(team, what))
                self._sleep(team.timeout, place, now - began)
        except BaseException as error:
            team.give_up(f"{what} ended by {type(error).__name__}: {error}")
            cause = self.explain(error, place)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._resume(place)

    def _drive(self, deadline: float, *, wait: bool = True) -> bool:
        """Go on with the first of what is pending, if nobody does; whether there is more to go on with."""
        first, mine = None, False
        try:
            with self._lock:
                if not self._driven and self._pending:
                    self._driven = mine = True
            if mine:
                first = self._pending[0]
                self._advance(first, deadline, wait=wait)
        finally:
            if mine:
                self._driven = False
                self._pass_on()
                if first is not None:
                    first.settle()
        return first is not None and first.done and bool(self._pending)

    def _advance(self, operation: Operation, deadline: float, *, wait: bool) -> None:
        """Go on with the first: to its end, until the deadline, or as far as it goes at once."""
        team, cause = self.team, None
        try:
            if not operation.done:  # else a signal kept it from being taken out
                self.stalls.number, self.stalls.what = operation.number, operation.what
                team.check()
                for _ in operation.steps:
                    now = time.monotonic()
                    if not wait or now >= deadline:
                        return
                    if operation.waited > team.timeout:
                        team.fail(_overdue(team, operation.what))
                    self._sleep(deadline - now, operation.place, operation.waited)
                    operation.waited += time.monotonic() - now
        except BaseException as error:
            team.give_up(f"{operation.what} ended by {type(error).__name__}: {error}")
            cause = self.explain(error, operation.place)
            if not isinstance(error, Exception):
                self._take_out(operation, cause)
                raise
        self._take_out(operation, cause)

    def _take_out(self, operation: Operation, cause: BaseException | None) -> None:
        with self._lock:
            if not operation.done:
                operation.end(cause)
            self._pending.popleft()

    def _wake_thread(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="hora-engine", daemon=True)
            self._threads.add(self._thread)
            self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        me = threading.current_thread()
        while not self._closed and self._thread is me:
            self._wanted.wait()
            self._hurried.wait(self._grace)
            while self._thread is me and (operation := self._first()) is not None:
                try:
                    self.run(operation, None)
                except Exception:  # noqa: BLE001 - whoever waits for the operation raises it
                    continue

    def _first(self) -> Operation | None:
        with self._lock:
            return self._pending[0] if self._pending else None


def _overdue(team: Team, what: str) -> str:
    ranks = ", ".join(map(str, team.missing()))
    return f"{what}: rank {ranks} did not come within {team.timeout:g} seconds."


_open: weakref.WeakSet[Queue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads: at the end of the interpreter they would be stopped in the middle of C++ code."""
    for queue in list(_open):
        queue.close("The interpreter ends.")


def _abandon_all() -> None:
    for queue in list(_open):
        queue.abandon()


os.register_at_fork(after_in_child=_abandon_all)

"""Runs a team's collectives, in the order in which they were called.

A collective goes on in whichever thread has time: in the call itself, as far as that needs no waiting; in
``wait()``; and in a thread of the queue. The thread begins at once where cores are idle, so that data
moves while the script computes. Where every core computes already, it would only take turns with the
script; there it begins after :data:`GRACE`, so that a script that never waits keeps no other rank waiting.
"""

from __future__ import annotations

import atexit
import collections
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hora.torch.engines._algorithms import Steps
from hora.torch.engines._team import Team

__all__ = ["DONE", "Observer", "Operation", "Queue"]

GRACE = 0.005
"""Seconds after which the thread goes on with what nobody waits for, on a host whose cores are all busy."""

LONGEST = 3600.0
"""Seconds that a thread waits at most for its turn before it looks again; none is ever so long."""

_FOREVER = timedelta(days=365)


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


class Operation(dist.Work):
    """A collective that has been called."""

    def __init__(self, queue: Queue, steps: Steps, tensors: Any, what: str, *, place: Any = None) -> None:
        super().__init__()
        self.steps, self.what, self.place = steps, what, place
        self.done = False
        self.error: BaseException | None = None
        self.waited = 0.0
        self._queue, self._tensors = queue, tensors
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait until it has ended.

        Raises:
            RuntimeError: it failed; or it did not end within ``timeout``, and goes on.
        """
        if not self.done:
            with torch.inference_mode(False):  # the engine's own memory was made outside
                self._queue.run(self, timeout.total_seconds() if timeout > timedelta() else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._queue.lock_of_futures:
            if self._future is None:
                self._ended: torch.futures.Future[None] = torch.futures.Future()
                # C++ is told of an error by a callback that raises; of `set_exception` it knows nothing.
                self._future = self._ended.then(self._outcome)
                if self.done:
                    self._ended.set_result(None)
                else:
                    self._queue.hurry()  # whoever waits for it in C++ cannot help
            return self._future

    def end(self, error: BaseException | None = None) -> None:
        """It has ended."""
        with self._queue.lock_of_futures:
            self.error, self.done = error, True
            self._queue._resume(self.place)
            self.steps.close()
            if self._future is not None:
                self._ended.set_result(None)

    def _outcome(self, _: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self._tensors


class _Done(dist.Work):
    """What a call that has waited returns."""

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE = _Done()


class Queue:
    """The collectives of one team.

    Args:
        team: who takes part.
        idle_cores: whether the host has cores on which nothing computes.
        alone: whether only the thread goes on with what was started: a collective may block.
    """

    def __init__(self, team: Team, *, idle_cores: bool, alone: bool = False) -> None:
        self.team = team
        self._alone = alone
        self.lock_of_futures = threading.Lock()
        self._grace = 0.0 if idle_cores else GRACE
        self._pending: collections.deque[Operation] = collections.deque()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._driven = False  # whether a thread goes on with what is pending; guarded by the lock
        self._waiting = 0  # threads that wait for their turn
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._hurried = threading.Event()
        self._closed = False
        self.observer: Observer | None = None
        _open.add(self)

    def call(self, steps: Steps, what: str) -> None:
        """Run a collective to its end."""
        place = None if self.observer is None else self.observer.enter(what)
        with self._lock:
            alone = not self._driven and not self._pending
            if alone:
                self._driven = True
            else:
                operation = Operation(self, steps, None, what, place=place)
                self._pending.append(operation)
        if not alone:
            operation.wait()
            return
        try:
            self._finish(steps, what, place)
        finally:
            self._release()

    def start(self, steps: Steps, tensors: Any, what: str) -> Operation:
        """Call a collective; it goes on by itself."""
        operation = Operation(self, steps, tensors, what)
        if self.observer is not None:
            try:
                operation.place = self.observer.enter(what)
            except Exception as error:  # noqa: BLE001 - raised by wait(): C++ that calls could not bear it here
                operation.end(error)
                return operation
        with self._turn:
            self._pending.append(operation)
            free = not self._driven and not self._alone
            self._driven |= free
        if free:
            try:
                self._advance(0.0, wait=False)
            finally:
                self._release()
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
            with self._turn:
                if operation.is_completed():  # meanwhile
                    return
                if self._driven:
                    self._waiting += 1
                    self._turn.wait(min(left, LONGEST))
                    self._waiting -= 1
                    continue
                self._driven = True
            try:
                self._advance(deadline, until=operation)
            finally:
                self._release()

    def hurry(self) -> None:
        """Let the thread begin at once."""
        self._hurried.set()
        self._wake_thread()

    def close(self, reason: str) -> None:
        """Nothing is called any more. What is under way fails."""
        self._closed = True
        self.team.fail(reason)
        self._hurried.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _release(self) -> None:
        with self._lock:
            self._driven = False
            if self._waiting:
                self._turn.notify_all()

    def explain(self, error: BaseException, place: Any) -> BaseException:
        """What to raise for an error in the collective of this place."""
        if self.observer is None or place is None or not isinstance(error, Exception):
            return error
        return self.observer.explain(error)

    def _sleep(self, seconds: float, place: Any) -> None:
        """Wait for the other ranks; if that takes long, the observer is told."""
        if self.team.sleep(seconds):
            return
        if self.observer is not None and place is not None:
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
                self._sleep(team.timeout, place)
        except BaseException as error:
            team.fail(f"{what} ended by {type(error).__name__}: {error}")
            cause = self.explain(error, place)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._resume(place)

    def _advance(self, deadline: float, *, until: Operation | None = None, wait: bool = True) -> None:
        """Go on with what is pending: to the operation, until the deadline, or as far as it goes at once."""
        team = self.team
        while self._pending and (until is None or not until.done):
            operation = self._pending[0]
            try:
                team.check()
                for _ in operation.steps:
                    if not wait:
                        return
                    now = time.monotonic()
                    if now >= deadline:
                        return
                    if operation.waited > team.timeout:
                        team.fail(_overdue(team, operation.what))
                    self._sleep(deadline - now, operation.place)
                    operation.waited += time.monotonic() - now
            except BaseException as error:
                team.fail(f"{operation.what} ended by {type(error).__name__}: {error}")
                cause = self.explain(error, operation.place)
                with self._turn:
                    self._pending.popleft()
                    operation.end(cause)
                    self._turn.notify_all()
                if not isinstance(error, Exception):
                    raise
                continue
            with self._turn:
                self._pending.popleft()
                operation.end()
                self._turn.notify_all()

    def _wake_thread(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="hora-engine", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            if self._grace:
                self._hurried.wait(self._grace)
            self._hurried.clear()
            while (operation := self._first()) is not None:
                try:
                    self.run(operation, None)
                except Exception:  # noqa: BLE001 - whoever waits for the operation raises it
                    continue

    def _first(self) -> Operation | None:
        with self._turn:
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

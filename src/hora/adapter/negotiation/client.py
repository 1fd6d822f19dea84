"""A rank's side of the negotiation: it asks the coordinator, and runs what all ranks have asked for.

What carries the tensors is the adapter's: it has a subclass that describes its requests and executes them.

One thread, the executor, reads what the coordinator releases and carries it out in that order, so that
every rank runs the same operations in the same order whatever the order of their calls. A second thread
sleeps until the coordinator says that a rank is gone; it then fails all that waits, even if the executor
is stuck in the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hora.adapter.context import Common
from hora.adapter.negotiation.coordinator import Coordinator
from hora.adapter.negotiation.errors import HorovodInternalError
from hora.adapter.negotiation.match import Ask, Key
from hora.adapter.negotiation.pending import Pending
from hora.adapter.negotiation.timeline import Trace

__all__ = ["Client", "Pending"]

READY: Key = (0, "init")

NAME_SECONDS = 0.05
"""How long an operation holds its name after it was asked for, while this rank has waited for nothing."""

LEAVE_SECONDS = 2.0
"""How long shutdown waits for an executor that may be stuck in the engine, because a rank is gone."""


class Client:
    """The dispatcher of the negotiated mode.

    Args:
        context: the job.
        control: connection on which this rank asks and is told.
        alarm: connection on which it hears that a rank is gone.
        coordinator: the other side, on rank 0, which is then told directly.
        trace: the timeline; only rank 0's is ever started.
        change_set: adds (given the ranks) or removes (given none) a process set; called on the executor,
            in the same order on all ranks.

    Attributes:
        as_horovod: tells the operations to follow Horovod where it differs from Hora.
    """

    as_horovod = True

    def __init__(
        self,
        context: Common,
        control: socket.socket,
        alarm: socket.socket,
        *,
        coordinator: Coordinator | None,
        trace: Trace,
        change_set: Callable[[Any, Sequence[int]], None],
    ) -> None:
        self._context = context
        self._control = control
        self._alarm = alarm
        self._coordinator = coordinator
        self._trace = trace
        self._change_set = change_set
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[Key, Pending] = {}
        self._recent: dict[Key, float] = {}
        self._counters: defaultdict[tuple[int, str], itertools.count[int]] = defaultdict(itertools.count)
        self._broken: str | None = None
        self._ready = Pending(READY)
        self._waiting[READY] = self._ready
        self._executor = threading.Thread(target=self._execute_all, name="hora-executor", daemon=True)
        self._watch = threading.Thread(target=self._watch_alarm, name="hora-alarm", daemon=True)
        self._executor.start()
        self._watch.start()

    # --- the adapter's ------------------------------------------------------------------------------

    def carry_out(self, works: Sequence[Pending], rows: Sequence[Any]) -> list[Any]:
        """Run the requests of these, several as one operation of the engine; their results.

        Args:
            works: all with a request.
            rows: of each, what the coordinator says of first dimensions; see :class:`Run`.
        """
        raise NotImplementedError

    def stand_in(self, key: Key, ask: Ask) -> Any:
        """A request of zeros, for an operation of the others after this rank has joined."""
        raise NotImplementedError

    def is_lost(self, error: Exception) -> bool:
        """Whether the engine has failed because a rank has ended."""
        return False

    def begin(self) -> None:
        """Called first on the executor."""

    def failure(self, text: str) -> HorovodInternalError:
        """The error of an operation that cannot be run because of what the ranks ask for."""
        return HorovodInternalError(text)

    def gone(self, text: str) -> HorovodInternalError:
        """The error of an operation that cannot be run because a rank has ended."""
        error = HorovodInternalError(text)
        error.echo = True
        return error

    # --- asking ---------------------------------------------------------------------------------

    def ask(
        self,
        kind: str,
        name: str | None,
        set_id: int,
        request: Any,
        ask: Ask,
        *,
        ready: Any = None,
    ) -> Pending:
        """Ask for an operation.

        Args:
            kind: as Horovod has it, a name is in use for one kind of operation only, and groups are a kind.
            name: that the user gave; without one it gets the next number.
            set_id: of the process set.
            request: for :meth:`carry_out`.
            ask: what the other ranks must agree with.
            ready: kept for :meth:`carry_out`.

        Raises:
            ValueError: an operation of that kind and name is under way on this rank.
            HorovodInternalError: a rank is gone, or has shut down.
        """
        if name is None:
            name = f"noname.{next(self._counters[set_id, kind])}"
        pending = Pending((set_id, f"{kind}.{name}"), request, timeline=self._context.timeline)
        pending.coordinator = self._coordinator
        pending.ready = ready
        self._ask(pending, ask)
        return pending

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks are connected.

        Raises:
            HorovodInternalError: they are not, after so many seconds.
        """
        if not self._ready.wait_until(seconds):
            raise HorovodInternalError(f"Not all ranks came to hvd.init() within {seconds:g} s.")
        self._ready.wait()

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; the last to join."""
        pending = Pending((0, "join"))
        self._enter(pending)
        self._tell(["join"])
        last: int = pending.wait()
        return last

    def add_process_set(self, process_set: Any) -> None:
        """Make a set usable, together with all ranks."""
        ask = Ask(kind="add", ranks=tuple(process_set.members))
        self._change_process_set(process_set, ask)

    def remove_process_set(self, process_set: Any) -> None:
        """Give a set up, together with all ranks."""
        assert process_set.process_set_id is not None
        self._change_process_set(process_set, Ask(kind="remove", root=process_set.process_set_id))

    def _change_process_set(self, process_set: Any, ask: Ask) -> None:
        name = f"{ask.kind}_process_set.{next(self._counters[0, ask.kind])}"
        pending = Pending((0, name), process_set=process_set)
        self._ask(pending, ask)
        pending.wait()

    def close(self, *, abrupt: bool = False) -> bool:
        """Say good-bye and stop; whether the executor has ended, rather than being stuck in the engine.

        Args:
            abrupt: leave without a good-bye, because this rank has failed.
        """
        self._break("Horovod has been shut down.")
        if not abrupt:
            with contextlib.suppress(OSError, HorovodInternalError):
                self._tell(["bye"])
        for connection in (self._control, self._alarm):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR if connection is self._alarm else socket.SHUT_WR)
        self._executor.join(LEAVE_SECONDS)
        ended = not self._executor.is_alive()
        self._watch.join(LEAVE_SECONDS)
        self._alarm.close()
        if ended:
            self._control.close()
        return ended

    def _ask(self, pending: Pending, ask: Ask) -> None:
        self._enter(pending)
        self._tell(["ask", *pending.key, ask])

    def _enter(self, pending: Pending) -> None:
        with self._lock:
            if self._broken is not None:
                raise self.gone(self._broken)
            if os.getpid() != self._context.pid:  # it shares the parent's connections, and would speak for it
                raise HorovodInternalError(
                    f"{pending.key[1]} was called in a child process, which is no rank. Call it in the "
                    "process that called hvd.init()."
                )
            # Whether the first has ended by now is chance, unless this rank has waited: always refused.
            now = time.monotonic()
            if pending.key in self._waiting or now < self._recent.get(pending.key, 0.0) + NAME_SECONDS:
                raise ValueError(
                    f"Duplicate name: {pending.key[1]} is under way on this rank. Wait for it with "
                    "hvd.synchronize(handle), or give this operation another name."
                )
            self._waiting[pending.key] = pending
            self._recent[pending.key] = now
            pending.recent = self._recent

    def _tell(self, message: list[Any]) -> None:
        if self._coordinator is not None:
            self._coordinator.tell(message)
            return
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._control.sendall(data)
        except OSError as error:
            self._break("Rank 0 is gone, and the coordinator with it.")
            raise self.gone(str(self._broken)) from error

    # --- running --------------------------------------------------------------------------------

    def _execute_all(self) -> None:
        self.begin()
        with contextlib.suppress(OSError), self._control.makefile("rb") as lines:
            for line in lines:
                messages = json.loads(line)
                for message in messages:
                    self._obey(message)
                if self._coordinator is not None and any(message[0] == "run" for message in messages):
                    self._tell(["idle"])
        self._break("Rank 0 is gone, and the coordinator with it.")

    def _watch_alarm(self) -> None:
        with contextlib.suppress(OSError), self._alarm.makefile("rb") as lines:
            for line in lines:
                for _, text in json.loads(line):
                    self._break(text)

    def _obey(self, message: list[Any]) -> None:
        match message:
            case ["run", items]:
                self._run(items)
            case ["fail", set_id, name, text, echo]:
                self._take((set_id, name)).fail(self.gone(text) if echo else self.failure(text))
            case ["ready"]:
                self._take(READY).succeed(None)
            case ["joined", last]:
                # The ranks counted different numbers of operations without a name; nothing is under way.
                self._counters.clear()
                self._take((0, "join")).succeed(last)
            case ["set", set_id, name, ranks]:
                self._change(self._take((set_id, name)), ranks)
            case ["end", text]:
                self._break(text)

    def _change(self, pending: Pending, ranks: Sequence[int]) -> None:
        if pending.process_set is None:
            return  # given up in the meantime: a rank is gone
        try:
            self._change_set(pending.process_set, ranks)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            pending.fail(HorovodInternalError(str(error)))
        else:
            pending.succeed(None)

    def _run(self, items: list[Any]) -> None:
        began = time.monotonic()
        works = [self._work((set_id, name), ask) for set_id, name, _, ask in items]
        if any(work.request is None for work in works):
            return  # given up in the meantime: a rank is gone
        outcome = self._outcome(lambda: self.carry_out(works, [item[2] for item in items]))
        ended = time.monotonic()
        for place, work in enumerate(works):
            self._trace.ran(work.key, work.key[1].partition(".")[0], began, ended)
            with self._lock:
                self._waiting.pop(work.key, None)
            if isinstance(outcome, HorovodInternalError):
                work.fail(outcome)
            else:
                work.succeed(outcome[place])

    def _outcome(self, run: Callable[[], list[Any]]) -> list[Any] | HorovodInternalError:
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - whoever waits is told, whatever it is
            failure = self.gone(str(error)) if self.is_lost(error) else HorovodInternalError(str(error))
            failure.__cause__ = error
            return failure

    def _work(self, key: Key, ask: list[Any] | None) -> Pending:
        """What this rank asked for; zeros where it has joined."""
        pending = self._waiting.get(key)
        if pending is not None or ask is None:
            return pending or Pending(key)
        return Pending(key, self.stand_in(key, Ask.from_wire(ask)))

    def _take(self, key: Key) -> Pending:
        with self._lock:
            return self._waiting.pop(key, None) or Pending(key)

    def _break(self, text: str) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = text
            waiting, self._waiting = list(self._waiting.values()), {}
        for pending in waiting:
            pending.fail(self.gone(text))

"""A rank's side of the negotiation: it asks the coordinator, and runs what all ranks have asked for.

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

import torch
import torch.distributed as dist

from hora.torch import _context
from hora.torch._context import Context
from hora.torch._execute import execute
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch._request import Request
from hora.torch.horovod._coordinator import Coordinator
from hora.torch.horovod._errors import HorovodInternalError
from hora.torch.horovod._match import Ask, Key
from hora.torch.horovod._timeline import Trace
from hora.torch.horovod._translate import describe, run_together, zeros

__all__ = ["Client", "Pending"]

PATIENCE = 0.05
"""Seconds after which rank 0 lets the coordinator watch for a stall of what it waits for."""

READY: Key = (0, "init")

NAME_SECONDS = 0.05
"""How long an operation holds its name after it was asked for, while this rank has waited for nothing."""

WORTH_TELLING = 2e-5
"""Seconds of waiting that the timeline keeps; a step asks for hundreds of results that are there."""

LEAVE_SECONDS = 2.0
"""How long shutdown waits for an executor that may be stuck in the engine, because a rank is gone."""


class Pending:
    """An operation under way."""

    __slots__ = (
        "_error",
        "_event",
        "_result",
        "coordinator",
        "key",
        "process_set",
        "ready",
        "recent",
        "request",
        "rows",
    )

    def __init__(
        self, key: Key, request: Request | None = None, *, process_set: ProcessSet | None = None
    ) -> None:
        self.key = key
        self.request = request
        self.process_set = process_set
        self.coordinator: Coordinator | None = None
        self.rows: list[list[int]] | None = None
        self.ready: Any = None
        self.recent: dict[Key, float] = {}
        self._event = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        ended = self._event.is_set()
        if ended:
            self.recent.pop(self.key, None)
        return ended

    def wait(self) -> Any:
        began = time.time()
        if self.coordinator is not None and not self._event.wait(PATIENCE):
            self.coordinator.wake()  # it sleeps, and nobody else has told it to watch this operation
        self._event.wait()
        ended = time.time()
        if ended - began > WORTH_TELLING and (context := _context.current.context) is not None:
            context.timeline.add(f"wait for {self.key[1]}", began, ended)
        self.recent.clear()
        if self._error is not None:
            raise self._error
        return self._result

    def wait_until(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def succeed(self, result: Any) -> None:
        if not self._event.is_set():
            self._result = result
            self.request = None
            self._event.set()

    def fail(self, error: BaseException) -> None:
        if not self._event.is_set():
            self._error = error
            self.request = None
            self._event.set()


class Client:
    """The dispatcher of the negotiated mode.

    Args:
        context: the job.
        group: of all ranks, used by the executor alone.
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
        context: Context,
        group: dist.ProcessGroup,
        control: socket.socket,
        alarm: socket.socket,
        *,
        coordinator: Coordinator | None,
        trace: Trace,
        change_set: Callable[[ProcessSet, Sequence[int]], None],
    ) -> None:
        self._context = context
        self._group = group
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
        self._cuda = context.device.type == "cuda"
        self._executor = threading.Thread(target=self._execute_all, name="hora-executor", daemon=True)
        self._watch = threading.Thread(target=self._watch_alarm, name="hora-alarm", daemon=True)
        self._executor.start()
        self._watch.start()

    # --- asking ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> Pending:
        """Ask for an operation.

        Raises:
            ValueError: an operation of that kind and name is under way on this rank.
            HorovodInternalError: a rank is gone, or has shut down.
        """
        set_id = request.process_set.process_set_id
        assert set_id is not None
        request.scaled_apart = True
        if request.process_set is global_process_set:
            request.own_group = self._group
        # As Horovod has it, a name is in use for one kind of operation only, and groups are a kind.
        kind = f"grouped_{request.kind.value}" if request.grouped else request.kind.value
        name = request.name
        if name is None:
            name = f"noname.{next(self._counters[set_id, kind])}"
        pending = Pending((set_id, f"{kind}.{name}"), request)
        pending.coordinator = self._coordinator
        if self._cuda and any(tensor.is_cuda for tensor in request.tensors):
            pending.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.ready.record()
        self._ask(pending, describe(request))
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

    def add_process_set(self, process_set: ProcessSet) -> None:
        """Make a set usable, together with all ranks."""
        ask = Ask(kind="add", ranks=tuple(process_set.members))
        self._change_process_set(process_set, ask)

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Give a set up, together with all ranks."""
        assert process_set.process_set_id is not None
        self._change_process_set(process_set, Ask(kind="remove", root=process_set.process_set_id))

    def _change_process_set(self, process_set: ProcessSet, ask: Ask) -> None:
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
                raise _gone(self._broken)
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
            raise _gone(str(self._broken)) from error

    # --- running --------------------------------------------------------------------------------

    def _execute_all(self) -> None:
        if self._cuda:
            torch.cuda.set_device(self._context.device)
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
                self._take((set_id, name)).fail(_gone(text) if echo else HorovodInternalError(text))
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
        requests = [work.request for work in works]
        if any(request is None for request in requests):
            return  # given up in the meantime: a rank is gone
        for work in works:
            if work.ready is not None:
                torch.cuda.current_stream().wait_event(work.ready)
        if len(works) == 1:
            request = works[0].request
            assert request is not None
            request.rows = works[0].rows = items[0][2]
            outcome = self._outcome(lambda: [execute(request)])
        else:
            outcome = self._outcome(lambda: run_together(requests))  # type: ignore[arg-type]
        if self._cuda:
            torch.cuda.current_stream().synchronize()
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
            failure = HorovodInternalError(str(error))
            failure.__cause__ = error
            return failure

    def _work(self, key: Key, ask: list[Any] | None) -> Pending:
        """What this rank asked for; zeros where it has joined."""
        pending = self._waiting.get(key)
        if pending is not None or ask is None:
            return pending or Pending(key)
        return Pending(key, zeros(key, Ask.from_wire(ask), self._context, own_group=self._group))

    def _take(self, key: Key) -> Pending:
        with self._lock:
            return self._waiting.pop(key, None) or Pending(key)

    def _break(self, text: str) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = text
            waiting, self._waiting = list(self._waiting.values()), {}
        for pending in waiting:
            pending.fail(_gone(text))


def _gone(text: str) -> HorovodInternalError:
    error = HorovodInternalError(text)
    error.echo = True
    return error

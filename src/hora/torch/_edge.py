"""The step edge: where all ranks agree that the job, which was asked to stop, saves and stops.

SIGTERM and SIGUSR1 come to the ranks at different moments, or to one of them alone. So each says at every
step edge whether it has been asked, in a tiny all-reduce that nobody waits for: its result is read
at the next edge, by when it has long been there. All ranks read the same, and stop at the same edge. Where
steps are very short they agree at every few edges only, as all have agreed before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from hora.core.notices import StopForNow, tell
from hora.torch._collectives import Max, allreduce_async
from hora.torch._context import Context, required
from hora.torch._exchange import barrier
from hora.torch._handles import Handle, synchronize

__all__ = ["SIGNALS", "StepEdge", "expect", "expected", "saves_at_edges", "step_edge", "stop_for_now"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take a machine away."""

ONE_REQUEST = 2.0
"""Seconds within which a second signal is the same request: a scheduler may send it to the launcher and to
the ranks, and the launcher hands it on."""


PERIOD = 0.05
"""Seconds between agreements that suffice: each costs some 0.3 ms of Python, which short steps would feel."""

MOST_EDGES = 8
"""From one agreement to the next, however short steps are: the next ones may be long."""

EVERY_EDGE = 64
"""Edges at the beginning, which compile and warm up, and tell little about steps."""


def step_edge() -> StepEdge:
    """The one of this job; from the first call on, the signals mean "stop at a step edge"."""
    context = required("step_edge")
    found = _edges.get(id(context))
    if found is None:
        expect()
        found = _edges[id(context)] = StepEdge(context)
        context.closing.append(lambda: _close(context))
    return found


def expect(saver: object | None = None) -> None:
    """There will be step edges: loader processes that are started from now on outlive the signals.

    Args:
        saver: what saves at them, also in later worlds of an elastic job.
    """
    _expecting.add(required("expect"))
    if saver is not None:
        _savers.add(saver)


def saves_at_edges() -> bool:
    """Whether something saves at step edges, and stops there when the job is asked to."""
    return bool(_savers)


def expected() -> bool:
    """Whether this process, or the one that it was forked from, stops at step edges, or is going to."""
    return bool(_expecting)


_edges: dict[int, StepEdge] = {}
_savers: weakref.WeakSet[Any] = weakref.WeakSet()
_expecting: weakref.WeakSet[Context] = weakref.WeakSet()


def _close(context: Context) -> None:
    _expecting.discard(context)
    _edges.pop(id(context)).close()


def stop_for_now(context: Context, step: int) -> NoReturn:
    """End this rank, as all others do at the same place, with exit code 75."""
    barrier()
    if context.watch is not None:
        context.watch.stops_for_now()
    tell("stopped", step=step)
    raise StopForNow


class StepEdge:
    """Made by :func:`step_edge`.

    Attributes:
        armed: whether signals are waited for: only the main thread of a program can.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pid = os.getpid()
        self._asked_at: float | None = None
        self._agreed = False
        self._edges, self._since, self._every = 0, 0, 1
        self._started_at = time.monotonic()
        self._handle: Handle | None = None
        self._before: dict[int, Any] = {}
        self.armed = threading.current_thread() is threading.main_thread()
        if self.armed:
            for number in SIGNALS:
                if not _foreign(number):
                    self._before[number] = signal.signal(number, self._on_signal)
            tell("edge")

    def asked(self) -> bool:
        """This rank is at a step edge: whether all ranks stop here. Every rank calls it, equally often.

        Raises:
            CollectiveError: a rank has joined (``hora.join``), and does not come to step edges.
        """
        if self._agreed:
            return True
        member = self._context.member
        mine = self._asked_at is not None or (member is not None and member.control.stopping)
        if self._context.world.size == 1:
            self._agreed = mine
            return mine
        if self._handle is not None:
            handle, self._handle = self._handle, None
            asked, every = synchronize(handle).tolist()
            self._agreed, self._every = asked > 0, -every  # the least that any rank has wished for
        self._edges += 1
        self._since += 1
        if not self._agreed and self._since >= self._every:
            flag = torch.tensor([int(mine), -self._wished()], dtype=torch.int32, device=self._context.control)
            before = set(self._context.pending)
            self._handle = allreduce_async(flag, op=Max, name="step edge")
            # All ranks have a part in it already when they come here, and nobody waits for the last one: a
            # program that ends with it under way has ended well.
            self._context.pending.intersection_update(before)
        return self._agreed

    def _wished(self) -> int:
        """Edges until the next agreement, as this rank would have it."""
        now = time.monotonic()
        took, self._started_at = (now - self._started_at) / self._since, now
        self._since = 0
        if self._edges <= EVERY_EDGE:
            return 1
        return max(1, min(MOST_EDGES, int(PERIOD / max(took, 1e-9))))

    def stop(self, step: int) -> NoReturn:
        """End this rank, as all others do, with its state saved: exit code 75.

        Args:
            step: steps that have been made.
        """
        stop_for_now(self._context, step)

    def close(self) -> None:
        """Give the signals back."""
        self._handle = None
        if self._pid != os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._before.clear()
        self.armed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child that was forked: its parent ends it so. SIGUSR1 comes to all processes of a Slurm step.
            if number == signal.SIGTERM:
                _die(number)
            return
        before = self._before.get(number)
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif self._context.settings.job is None and now - self._asked_at > ONE_REQUEST:
            _die(number)  # under `hora run` the launcher sees to it
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _foreign(number: int) -> bool:
    """Whether the signal is somebody else's: ignored on purpose, or caught in C, as faulthandler does."""
    handler = signal.getsignal(number)
    if handler is None or handler is signal.SIG_IGN:
        return True
    if handler is not signal.SIG_DFL or sys.platform != "linux":
        return False
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)

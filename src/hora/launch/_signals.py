"""Signals to the launcher, as events of its loop."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Catches the signals that end a job while the block runs; does nothing outside the main thread.

    Args:
        impatient: called at once, inside the handler, when a second signal comes: the loop may be stuck
            in a write to a terminal that stands still.

    Attributes:
        wakeup: readable when a signal has come; None outside the main thread.
    """

    def __init__(self, impatient: Callable[[], None]) -> None:
        self.wakeup: int | None = None
        self._impatient = impatient
        self._caught: list[int] = []
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self.wakeup = self._reader.fileno()
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            # What is ignored stays so: nohup ignores SIGHUP, and a shell SIGINT for what it runs with &.
            # And a program that calls hora.run may use SIGUSR1 for something else.
            own = number == signal.SIGUSR1 and signal.getsignal(number) is not signal.SIG_DFL
            if signal.getsignal(number) not in (signal.SIG_IGN, None) and not own:
                self._before[number] = signal.signal(number, self._handle)
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # Inherited from some daemons; the kernel would throw the ranks' exit codes away.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.wakeup is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._reader.close()
            self._writer.close()

    def take(self) -> list[int]:
        """The signals that came since the last call."""
        caught, self._caught = self._caught, []
        return caught

    @property
    def pending(self) -> bool:
        """Whether some have come that were not taken."""
        return bool(self._caught)

    def clear(self) -> None:
        """Make ``wakeup`` unreadable again."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)
        self._count += 1
        if self._count > 1:
            self._impatient()

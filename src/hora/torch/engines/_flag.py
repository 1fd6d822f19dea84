"""What one thread tells another."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Flag"]


class Flag:
    """An event. A signal handler may raise at any moment, which ``threading.Event`` cannot bear."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set
            self._lock.release()

    def wait(self, seconds: float = -1) -> None:
        """Until it is set, at most so many seconds; then it is not set any more."""
        self._lock.acquire(timeout=seconds)

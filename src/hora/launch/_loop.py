"""What the supervisor waits for: descriptors and moments. One thread; nothing polls."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

__all__ = ["Loop", "Timer"]


class Timer:
    """Something that happens by time alone.

    Attributes:
        at: when, ``time.monotonic()`` in seconds; None: never. It is None again when it has happened.
    """

    def __init__(self, react: Callable[[], object]) -> None:
        self.at: float | None = None
        self._react = react

    def by(self, at: float) -> None:
        """At this moment, unless it is due earlier anyway."""
        self.at = at if self.at is None else min(self.at, at)

    def fire(self, now: float) -> None:
        """React if it is due."""
        if self.at is not None and now >= self.at:
            self.at = None
            self._react()


class Loop:
    """Waits for descriptors and timers, and calls what belongs to each."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []

    def watch(self, fd: int, react: Callable[[], object]) -> None:
        """Call ``react`` whenever the descriptor is readable, or at its end."""
        self._selector.register(fd, selectors.EVENT_READ, (react, None))

    def watch_room(self, fd: int, react: Callable[[], object] | None) -> None:
        """Call ``react`` when the descriptor, watched otherwise or not, takes data; None: no longer."""
        known = self._selector.get_map().get(fd)
        read = None if known is None else known.data[0]
        mask = (0 if read is None else selectors.EVENT_READ) | (0 if react is None else selectors.EVENT_WRITE)
        if known is None:
            self._selector.register(fd, mask, (read, react))
        elif mask:
            self._selector.modify(fd, mask, (read, react))
        else:
            self._selector.unregister(fd)

    def forget(self, fd: int) -> None:
        """Watch the descriptor no longer; to be called before it is closed."""
        self._selector.unregister(fd)

    def timer(self, react: Callable[[], object]) -> Timer:
        """A new timer, not yet set."""
        timer = Timer(react)
        self._timers.append(timer)
        return timer

    def drop(self, *timers: Timer) -> None:
        """Forget timers."""
        self._timers = [timer for timer in self._timers if timer not in timers]

    def turn(self) -> None:
        """Wait until something happens, and react to all that has."""
        times = [timer.at for timer in self._timers if timer.at is not None]
        patience = max(0.0, min(times) - time.monotonic()) if times else None
        watched = self._selector.get_map()
        for key, mask in self._selector.select(patience):
            # What another reaction has given up meanwhile must not be called any more.
            for event, react in zip((selectors.EVENT_READ, selectors.EVENT_WRITE), key.data, strict=True):
                if mask & event and react is not None and watched.get(key.fd) is key:
                    react()

    def fire(self) -> None:
        """React to the timers that are due."""
        now = time.monotonic()
        for timer in list(self._timers):
            timer.fire(now)

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        """React to what happens until that is so, but not longer than so many seconds."""
        limit = self.timer(lambda: None)
        limit.at = time.monotonic() + seconds
        while not done() and limit.at is not None:
            self.turn()
            self.fire()
        self.drop(limit)

    def close(self) -> None:
        """Give the selector up; the descriptors stay open."""
        self._selector.close()

"""An operation that was asked for, and for which somebody waits."""

from __future__ import annotations

import threading
import time
from typing import Any

from hora.adapter.negotiation.coordinator import Coordinator
from hora.adapter.negotiation.match import Key
from hora.core.events import Timeline

__all__ = ["Pending"]

PATIENCE = 0.05
"""Seconds after which rank 0 lets the coordinator watch for a stall of what it waits for."""

WORTH_TELLING = 2e-5
"""Seconds of waiting that the timeline keeps; a step asks for hundreds of results that are there."""


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
        "timeline",
    )

    def __init__(
        self,
        key: Key,
        request: Any = None,
        *,
        process_set: Any = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.key = key
        self.request = request
        self.process_set = process_set
        self.timeline = timeline
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
        if ended - began > WORTH_TELLING and self.timeline is not None:
            self.timeline.add(f"wait for {self.key[1]}", began, ended)
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

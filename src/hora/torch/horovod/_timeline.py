"""Horovod's timeline: rank 0 writes what was negotiated and run as a Chrome trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from hora.torch.horovod._match import Key

__all__ = ["Trace"]


class Trace:
    """Collects events between :meth:`start` and :meth:`stop`; without them each call costs one test.

    Each operation has a lane (``tid``) of its own, named after it. Times are microseconds since the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}
        self._asked: dict[Key, float] = {}
        self._began = 0.0
        self._mark_cycles = False

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin a new file; one that is being recorded is written first."""
        self.stop()
        with self._lock:
            self._path = Path(path)
            self._path.write_text("[]")  # fails here, not at the end of a training
            self._mark_cycles = mark_cycles
            self._began = time.monotonic()
            self._lanes = {}
            self._asked = {}
            self._events = [
                {
                    "name": "process_name",
                    "ph": "M",
                    "pid": 0,
                    "args": {"name": "Horovod", "start_time_since_epoch_in_micros": int(time.time() * 1e6)},
                }
            ]

    def stop(self) -> None:
        """Write the file. Without :meth:`start` it does nothing."""
        with self._lock:
            path, self._path = self._path, None
            if path is not None:
                path.write_text("[\n" + ",\n".join(json.dumps(event) for event in self._events) + "\n]\n")
            self._events = []

    def asked(self, key: Key) -> None:
        """The first rank asked for an operation."""
        if self._path is not None:
            self._asked.setdefault(key, time.monotonic())

    def released(self, operations: list[tuple[Key, str]]) -> None:
        """All ranks have asked for these, and run them now, together."""
        if self._path is None:
            return
        now = time.monotonic()
        with self._lock:
            for key, kind in operations:
                self._add(f"NEGOTIATE_{kind.upper()}", self._asked.pop(key, now), now, key)
            if self._mark_cycles:
                at = round((now - self._began) * 1e6)
                self._events.append(
                    {"name": "CYCLE_START", "ph": "i", "s": "g", "ts": at, "pid": 0, "tid": 0}
                )

    def ran(self, key: Key, kind: str, began: float, ended: float) -> None:
        """Rank 0 has run an operation; ``time.monotonic()`` before and after."""
        if self._path is not None:
            with self._lock:
                self._add(kind.upper(), began, ended, key)

    def _add(self, name: str, began: float, ended: float, key: Key) -> None:
        lane = key[1] if key[0] == 0 else f"{key[1]} (process set {key[0]})"
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            self._events.append(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
            )
        began = max(began, self._began)
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": round((began - self._began) * 1e6),
                "dur": max(0, round((ended - began) * 1e6)),
                "pid": 0,
                "tid": number,
            }
        )

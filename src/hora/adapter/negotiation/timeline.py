"""Horovod's timeline: rank 0 writes what was negotiated and run as a Chrome trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from hora.adapter.negotiation.match import Key

__all__ = ["Trace"]


class Trace:
    """Writes events between :meth:`start` and :meth:`stop`; without them each call costs one test.

    Events are in the file as soon as they have happened, so that it can be read, and survives a kill;
    Chrome does without the closing bracket that :meth:`stop` adds.

    Each operation has a lane (``tid``) of its own, named after it. Times are microseconds since the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._lanes: dict[str, int] = {}
        self._asked: dict[Key, float] = {}
        self._began = 0.0
        self._mark_cycles = False

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin a new file; one that is being recorded is written first."""
        self.stop()
        with self._lock:
            self._file = Path(path).open("w")  # noqa: SIM115 - closed by stop()
            self._file.write("[\n")
            self._mark_cycles = mark_cycles
            self._began = time.monotonic()
            self._lanes = {}
            self._asked = {}
            arguments = {"name": "Horovod", "start_time_since_epoch_in_micros": int(time.time() * 1e6)}
            first = {"name": "process_name", "ph": "M", "pid": 0, "args": arguments}
            self._file.write(json.dumps(first))
            self._file.flush()

    def stop(self) -> None:
        """Complete the file. Without :meth:`start` it does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.write("\n]\n")
                file.close()

    def asked(self, key: Key) -> None:
        """The first rank asked for an operation."""
        if self._file is not None:
            self._asked.setdefault(key, time.monotonic())

    def released(self, operations: list[tuple[Key, str]]) -> None:
        """All ranks have asked for these, and run them now, together."""
        if self._file is None:
            return
        now = time.monotonic()
        with self._lock:
            for key, kind in operations:
                self._add(f"NEGOTIATE_{kind.upper()}", self._asked.pop(key, now), now, key)
            if self._mark_cycles:
                at = round((now - self._began) * 1e6)
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "ts": at, "pid": 0, "tid": 0})
            self._flush()

    def ran(self, key: Key, kind: str, began: float, ended: float) -> None:
        """Rank 0 has run an operation; ``time.monotonic()`` before and after."""
        if self._file is not None:
            with self._lock:
                self._add(kind.upper(), began, ended, key)
                self._flush()

    def _add(self, name: str, began: float, ended: float, key: Key) -> None:
        lane = key[1] if key[0] == 0 else f"{key[1]} (process set {key[0]})"
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}})
        began = max(began, self._began)
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": round((began - self._began) * 1e6),
                "dur": max(0, round((ended - began) * 1e6)),
                "pid": 0,
                "tid": number,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(f",\n{json.dumps(event)}")

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()

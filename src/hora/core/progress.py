"""What a person sees while a training runs: a live bar, plain lines, or nothing.

Rank 0 describes where the training stands (:class:`Progress`) and hands it to a display. Under
``hora run`` that is a :class:`PipeDisplay`, which passes the records on to the supervisor; the
supervisor owns the terminal, so the bar and the output of the ranks never mix. A display never blocks
the training, never raises because its reader is gone, and never calls a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from hora.core import _progress_text as words
from hora.core._progress_bar import BarDisplay
from hora.core.settings import Settings

__all__ = [
    "BarDisplay",
    "Display",
    "LineDisplay",
    "PipeDisplay",
    "Progress",
    "SilentDisplay",
    "decode",
    "display",
]

LARGEST = 2**63
"""Counts beyond this are malformed: nothing that is trained has so many samples."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training stands.

    Attributes:
        done: units of the whole training that are done.
        total: units of the whole training; 0 when nobody knows.
        unit: what is counted, in the plural.
        step: optimizer steps done.
        epoch: the epoch under way, counted from 1; 0 when there are no epochs.
        epochs: epochs of the whole training; 0 when nobody knows.
        values: loss, accuracy and the like, already reduced over the ranks, in the order to show.
        rate: units per second of all workers together.
        size: number of workers, for the rate per worker.
        eta: seconds to go; None lets the display derive it from the rate.
    """

    done: int
    total: int
    unit: str = "samples"
    step: int = 0
    epoch: int = 0
    epochs: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    rate: float = 0.0
    size: int = 1
    eta: float | None = None


class Display(Protocol):
    """Shows progress to somebody. All methods may be called from any thread."""

    def update(self, progress: Progress) -> None:
        """Show where the training stands. Cheap enough to be called at every step."""

    def note(self, text: str) -> None:
        """Say something once, such as "target reached"."""

    def print_line(self, text: str, stream: TextIO) -> None:
        """Write one line of a worker's output, with or without its newline, to ``stream``.

        Raises:
            OSError: the stream cannot be written (its reader is gone, say).
        """

    def close(self) -> None:
        """Show what is pending and let go of the terminal. May be called again, from a signal handler too."""


class LineDisplay:
    """Plain lines for logs and files: no escape codes, no carriage returns.

    One line at the end of each epoch (but not more than one a second), else one every ``every``
    seconds, and one for the last state.

    Args:
        stream: where the lines go.
        every: seconds between two lines inside an epoch.
        clock: seconds that only grow; tests pass their own.
    """

    def __init__(
        self, stream: TextIO, *, every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._lock = threading.RLock()
        self._pending: Progress | None = None
        self._last = clock()
        self._gone = False

    def update(self, progress: Progress) -> None:
        with self._lock:
            before, self._pending = self._pending, progress
            waited = self._clock() - self._last
            if before is not None and before.epoch != progress.epoch and waited >= min(1.0, self._every):
                self._last = self._clock()
                self._write(words.line(before))
            elif waited >= self._every or words.fraction(progress) == 1.0:
                self._write_pending()

    def note(self, text: str) -> None:
        with self._lock:
            for part in text.splitlines():
                self._write(words.clean(part))

    def print_line(self, text: str, stream: TextIO) -> None:
        with self._lock:
            write_line(text, stream)

    def close(self) -> None:
        with self._lock:
            if self._pending is not None:  # whatever was left will not be done
                self._pending = dataclasses.replace(self._pending, eta=math.inf)
            self._write_pending()

    def _write_pending(self) -> None:
        progress, self._pending = self._pending, None
        if progress is not None:
            self._last = self._clock()
            self._write(words.line(progress))

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            write_line(text, self._stream)
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self._gone = True


class SilentDisplay:
    """Shows no progress; the output of the workers still gets through."""

    def update(self, progress: Progress) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def print_line(self, text: str, stream: TextIO) -> None:
        write_line(text, stream)

    def close(self) -> None:
        pass


class PipeDisplay:
    """Rank 0's side of the status pipe: JSON lines for the supervisor, which :func:`decode` reads.

    A record is dropped when the pipe is full and all are when its reader is gone, so that a stopped or
    dead supervisor cannot hold up the training. Lines stay below ``PIPE_BUF``, which makes each write
    all or nothing.

    Args:
        fd: write end of the pipe; it is made non-blocking.
        every: seconds between two progress records. The last one is never left out.
    """

    def __init__(self, fd: int, *, every: float = 0.1) -> None:
        self._fd = fd
        self._every = every
        self._next = 0.0
        self._pending: Progress | None = None
        self._gone = False
        os.set_blocking(fd, False)

    def update(self, progress: Progress) -> None:
        self._pending = progress
        now = time.monotonic()
        if now >= self._next or progress.done >= progress.total > 0:
            self._next = now + self._every
            self._send_pending()

    def note(self, text: str) -> None:
        self._send(_note_line(text))

    def print_line(self, text: str, stream: TextIO) -> None:
        write_line(text, stream)

    def close(self) -> None:
        if self._pending is not None and not self._send_pending() and not self._gone:
            # Full at the very end: half a second is enough for a reader that is alive.
            with contextlib.suppress(OSError, ValueError):
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(500)
            self._send_pending()
        self._pending = None

    def _send_pending(self) -> bool:
        progress = self._pending
        if progress is None:
            return True
        if self._send(_progress_line(progress)):
            self._pending = None
        return self._pending is None

    def _send(self, line: bytes) -> bool:
        if self._gone:
            return False
        try:
            os.write(self._fd, line)
        except BlockingIOError:
            return False
        except OSError:  # EPIPE, or EBADF when the script closed all descriptors: nobody listens any more
            self._gone = True
            return False
        return True


def display(settings: Settings, *, stream: TextIO) -> Display:
    """The display that suits the settings and the stream.

    Under a supervisor: the status pipe. Else ``settings.progress`` decides: ``off`` shows nothing,
    ``lines`` plain lines, ``bar`` a live bar, and ``auto`` a bar where ``stream`` is a terminal that can
    move its cursor. Ranks other than 0 show nothing.
    """
    if settings.status_fd is not None:
        return PipeDisplay(settings.status_fd) if _is_pipe(settings.status_fd) else SilentDisplay()
    if settings.progress == "off" or (settings.rank or 0) > 0:
        return SilentDisplay()
    if settings.progress == "lines" or os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return LineDisplay(stream)
    if settings.progress == "bar" or stream.isatty():
        return BarDisplay(stream)
    return LineDisplay(stream)


def decode(line: str) -> Progress | str | None:
    """Read one line of the status pipe: a record, the text of a note, or None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if record.get("kind") == "note":
        text = record.get("text")
        return text if isinstance(text, str) else None
    if record.get("kind") != "progress":
        return None
    try:
        return _progress(record)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def write_line(text: str, stream: TextIO) -> None:
    """Write a worker's line as it is, in one write, with exactly one newline."""
    stream.write(words.encodable(text.removesuffix("\n") + "\n", stream))
    stream.flush()


def _progress(record: dict[str, Any]) -> Progress:
    values = record.get("values", {})
    eta = record.get("eta")
    if not isinstance(values, dict):
        raise TypeError(values)
    return Progress(
        done=_count(record["done"]),
        total=_count(record["total"]),
        unit=str(record.get("unit", "samples")),
        step=_count(record.get("step", 0)),
        epoch=_count(record.get("epoch", 0)),
        epochs=_count(record.get("epochs", 0)),
        values={str(name): _real(value) for name, value in values.items()},
        rate=_real(record.get("rate", 0.0)),
        size=_count(record.get("size", 1)),
        eta=None if eta is None else _real(eta),
    )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        raise ValueError(value)
    return int(value)


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


def _progress_line(progress: Progress) -> bytes:
    fields = {item.name: getattr(progress, item.name) for item in dataclasses.fields(progress)}
    values = {str(name)[:80]: float(value) for name, value in progress.values.items()}
    fields |= {"kind": "progress", "unit": progress.unit[:40], "rate": float(progress.rate)}
    if progress.eta is not None:
        fields["eta"] = float(progress.eta) if math.isfinite(progress.eta) else None
    while True:
        line = json.dumps(fields | {"values": values}).encode() + b"\n"
        if len(line) <= select.PIPE_BUF or not values:
            return line
        values.popitem()  # the first ones matter most


def _note_line(text: str) -> bytes:
    while True:
        line = json.dumps({"kind": "note", "text": text}).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            return line
        text = text[: len(text) * 3 // 4]


def _is_pipe(fd: int) -> bool:
    # A child of rank 0 inherits the variable but not the descriptor, whose number may mean another file.
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and sys.platform != "win32"
    except OSError:
        return False

"""The live block at the bottom of a terminal, and the workers' lines above it."""

from __future__ import annotations

import io
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from hora.core import _progress_text as words

if TYPE_CHECKING:
    from rich.text import Text

    from hora.core.progress import Progress

__all__ = ["BarDisplay"]

WIDEST_BAR = 60
NARROWEST_BAR = 8
GAP = 2


class BarDisplay:
    """Two lines that stay at the bottom: bar, percent, epoch, time to go; values and throughput.

    The cursor is never hidden and always rests at the start of the line below the block, so that a
    killed program leaves a usable terminal. Each change is one write: erase, new lines, block.

    Args:
        stream: the terminal.
        every: seconds between two redraws.
        width: columns; None follows the terminal, also when it is resized.
        clock: seconds that only grow; tests pass their own.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every: float = 0.1,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Here and not at the top: the import costs some 50 ms, which only a terminal has to pay.
        from rich.console import Console

        self._stream = stream
        self._every = every
        self._fixed_width = width
        self._clock = clock
        # Re-entrant: close() may be called by a signal handler that interrupted a write.
        self._lock = threading.RLock()
        self._console = Console(
            file=io.StringIO(), force_terminal=True, legacy_windows=False, width=400, height=2
        )
        self._unicode = _is_unicode(stream)
        self._progress: Progress | None = None
        self._next = 0.0
        self._block = ""
        self._block_width = 0
        self._cells: list[int] = []
        self._shown: list[int] = []  # cells of the lines that stand on the screen now
        self._closed = False

    def update(self, progress: Progress) -> None:
        with self._lock:
            self._progress = progress
            now = self._clock()
            if not self._closed and (now >= self._next or words.fraction(progress) == 1.0):
                self._next = now + self._every
                self._redraw()

    def note(self, text: str) -> None:
        with self._lock:
            self._show("".join(f"{words.sanitized(part)}\n" for part in text.splitlines()))

    def print_line(self, text: str, stream: TextIO) -> None:
        with self._lock:
            if not stream.isatty():
                stream.write(words.encodable(text.removesuffix("\n") + "\n", stream))
                stream.flush()
            elif stream is self._stream or _same_terminal(stream, self._stream):
                self._write(self._erase() + words.sanitized(text) + "\n" + self._draw())
            else:
                stream.write(words.encodable(words.sanitized(text) + "\n", stream))
                stream.flush()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            if self._progress is not None:
                self._progress = replace(self._progress, eta=math.inf)  # whatever was left will not be done
            self._redraw()
            self._closed = True
            self._shown = []

    def _redraw(self) -> None:
        if self._progress is not None:
            self._block = ""
            self._show("")

    def _show(self, above: str) -> None:
        try:
            self._write(self._erase() + above + self._draw())
        except (OSError, ValueError):  # the terminal was hung up, or the stream closed: nobody looks any more
            self._closed = True

    def _write(self, text: str) -> None:
        self._stream.write(words.encodable(text, self._stream))
        self._stream.flush()

    def _erase(self) -> str:
        if not self._shown:
            return ""
        # Terminals re-wrap their lines when they become narrower, so a line may take several rows now.
        width = self._width()
        rows = sum(max(1, math.ceil(cells / width)) for cells in self._shown)
        self._shown = []
        return f"\r\x1b[{rows}A\x1b[J"

    def _draw(self) -> str:
        if self._progress is None or self._closed:
            return ""
        # One column stays free: a full line would make some terminals wrap.
        width = self._width()
        if not self._block or width != self._block_width:
            lines = self._render(self._progress, width - 1)
            with self._console.capture() as capture:
                for text in lines:
                    self._console.print(text, no_wrap=True, overflow="ignore", crop=False)
            self._block, self._block_width = capture.get(), width
            self._cells = [text.cell_len for text in lines]
        self._shown = self._cells
        return self._block

    def _width(self) -> int:
        if self._fixed_width is not None:
            return self._fixed_width
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _render(self, progress: Progress, width: int) -> list[Text]:
        first = _fit(
            [
                (0, words.percent(progress), "bold"),
                (2, words.epoch(progress), ""),
                (1, words.to_go(progress), "cyan"),
            ],
            width - NARROWEST_BAR - GAP,
        )
        part = words.fraction(progress)
        if part is not None:
            room = width - first.cell_len - GAP
            bar = _bar(part, min(room, WIDEST_BAR), unicode=self._unicode)
            first = bar.append(" " * GAP).append_text(first) if room >= NARROWEST_BAR else first
        # First the loss, then the speed, an accuracy or the second value, the speed per worker, the rest.
        ranked = sorted(progress.values, key=_importance)
        values = [
            (99 if name == "lr" else 1 + 2 * ranked.index(name), f"{words.clean(name)} {value}", "")
            for name, (_, value) in zip(progress.values, words.values(progress), strict=True)
        ]
        second = _fit(
            [
                *values,
                (2, words.speed(progress), "bold"),
                (4, words.per_worker(progress), "dim"),
            ],
            width,
        )
        return [line for line in (first, second) if line.cell_len]


def _importance(name: str) -> int:
    """The loss, then what is better when higher, then the rest; the schedule's own rate surprises nobody."""
    if name == "lr":
        return 3
    return 0 if name == "loss" else 1 if "accuracy" in name else 2


def _fit(parts: list[tuple[int, str, str]], width: int) -> Text:
    """Join (importance, text, style) in their order; the least important go first when it is too wide."""
    from rich.text import Text

    parts = [part for part in parts if part[1]]
    while True:
        line = Text(" " * GAP).join(Text(text, style) for _, text, style in parts)
        if line.cell_len <= width or not parts:
            return line
        if len(parts) == 1:
            line.truncate(max(0, width))
            return line
        parts.remove(max(parts, key=lambda part: part[0]))


def _bar(part: float, width: int, *, unicode: bool) -> Text:
    from rich.text import Text

    if not unicode:
        full = int(part * width)
        return Text().append("#" * full, "green").append("-" * (width - full), "dim")
    halves = int(part * width * 2)
    full, half = divmod(halves, 2)
    bar = Text().append("━" * full + "╸" * half, "green")
    return bar.append("─" * (width - full - half), "dim")


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf8")


def _same_terminal(one: TextIO, other: TextIO) -> bool:
    try:
        return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError):
        return False

"""What the ranks print: cut into lines, prefixed, shown on the console and kept in one log per rank.

The logs take the bytes as they came, stdout and stderr in the order in which they arrived. The console
takes whole lines, so that ranks never mix inside a line, and of what a progress bar rewrites with
carriage returns only the last state.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from hora.core.progress import Display

__all__ = ["Console", "ConsoleClosedError", "Lines", "Log", "Tail"]

LONGEST_LINE = 65536
"""Bytes of a line that are held back until its end comes; longer lines reach the console in pieces."""

PIECE = 4096
"""PIPE_BUF on Linux: when poll() calls a pipe writable, a write of so many bytes does not block."""

WHILE = 0.1
"""Seconds between two times that other things are seen to while a slow reader is waited for."""

REDRAW_SECONDS = 5.0
"""How often a bar drawn with carriage returns is shown on the console before its line ends."""


class ConsoleClosedError(Exception):
    """Whoever read the launcher's stdout has gone, as with ``hora run ... | head -1``."""


class Lines:
    """Cuts one stream of one rank into whole lines for the console."""

    def __init__(self) -> None:
        self._rest = b""
        self.redraw: float | None = None  # when the state of an unfinished bar is to be shown
        self._shown = b""

    def feed(self, data: bytes, now: float) -> bytes:
        """The lines that ``data`` completes, each with its newline; empty when there is none."""
        cut = data.rfind(b"\n") + 1
        if cut:
            whole, self._rest = self._rest + data[:cut], data[cut:]
            self.redraw, self._shown = None, b""
        else:
            whole, self._rest = b"", self._rest + data
        if b"\r" in whole:
            lines = (line.rstrip(b"\r") for line in whole.split(b"\n"))
            whole = b"\n".join(line[line.rfind(b"\r") + 1 :] for line in lines)
        if b"\r" in self._rest:
            self._rest = self._rest[self._rest[:-1].rfind(b"\r") + 1 :]
            if self.redraw is None:
                self.redraw = now + REDRAW_SECONDS
        while len(self._rest) > LONGEST_LINE:
            end = _character_edge(self._rest, LONGEST_LINE)
            whole, self._rest = whole + self._rest[:end] + b"\n", self._rest[end:]
        return whole

    def unfinished(self, now: float) -> bytes:
        """The present state of a bar, as a line; empty when it has not changed since the last time."""
        self.redraw = now + REDRAW_SECONDS
        state = self._rest.strip(b"\r")
        if not state or state == self._shown:
            return b""
        self._shown = state
        return state + b"\n"

    def close(self) -> bytes:
        """What came after the last newline, as a line."""
        rest, self._rest, self.redraw = self._rest.rstrip(b"\r"), b"", None
        return rest + b"\n" if rest and rest != self._shown else b""


def _character_edge(data: bytes, end: int) -> int:
    """The nearest position at or before ``end`` that does not split a UTF-8 character."""
    for back in range(4):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end


class Tail:
    """The last lines of a stream, for the report about a rank that left no traceback."""

    def __init__(self, *, lines: int = 60) -> None:
        self._lines: deque[bytes] = deque(maxlen=lines)
        self._count = lines

    def feed(self, whole: bytes) -> None:
        self._lines.extend(whole[-LONGEST_LINE:].splitlines()[-self._count :])

    def text(self) -> list[str]:
        return [line.decode("utf-8", "replace").rstrip() for line in self._lines]


class Log:
    """A rank's log file. A full disk costs the log, not the job.

    Args:
        path: where to write.
        complain: told once when writing fails.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._path = path
        self._fd: int | None = None
        self._rest = [b"", b""]
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(error)

    def feed(self, which: int, data: bytes) -> None:
        """Add bytes of stdout (0) or stderr (1). Both are cut at line ends, so that lines stay whole."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut or len(self._rest[which]) > LONGEST_LINE:
            self._write(self._rest[which] + data[:cut])
            self._rest[which] = data[cut:]
        else:
            self._rest[which] += data

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while self._fd is not None and view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write what came after the last newline."""
        rest, self._rest = self._rest, [b"", b""]
        for data in rest:
            self._write(data)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _give_up(self, error: OSError) -> None:
        self.close()
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        self._complain(f"logs in {self._path.parent} are incomplete from here on: {reason}.")


class Console:
    """The launcher's stdout and stderr.

    Args:
        prefix: put ``[rank] `` in front of each line.
        quiet: drop the ranks' lines.
        wakeup: a descriptor that becomes readable when a signal has come; waiting for a slow reader of
            the output stops then, and with it the output.
    """

    def __init__(self, *, prefix: bool, quiet: bool, wakeup: int | None = None) -> None:
        self._streams: tuple[TextIO | None, TextIO | None] = (sys.stdout, sys.stderr)
        self._quiet = quiet
        self._wakeup = wakeup
        self._fds = tuple(_plain_descriptor(stream) for stream in self._streams)
        self._dim = tuple(prefix and _has_colour(stream) for stream in self._streams)
        self._prefix = prefix
        self._muted = [quiet, quiet]
        self.display: Display | None = None
        self._meanwhile: list[Callable[[], None]] = []

    def meanwhile(self, do: Callable[[], None]) -> None:
        """From now on do this several times a second while a slow reader of the output is waited for."""
        self._meanwhile.append(do)

    def lines(self, rank: int, which: int, whole: bytes) -> None:
        """Show whole lines of a rank; ``which`` is 0 for its stdout, 1 for its stderr.

        Raises:
            ConsoleClosedError: nobody reads stdout any more.
        """
        stream = self._streams[which]
        if stream is None or self._muted[which] or not whole:
            return
        if self._prefix:
            mark = b"[%d] " % rank
            if self._dim[which]:
                mark = b"\x1b[2m" + mark[:-1] + b"\x1b[0m "
            whole = mark + whole[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        try:
            self._write(stream, self._fds[which], whole)
        except BrokenPipeError as error:
            self.mute(which)
            if which == 0:
                raise ConsoleClosedError from error
        except (OSError, ValueError) as error:  # the terminal was hung up, the stream closed, its disk full
            self.mute(which)
            self.say(f"hora: the ranks' {('stdout', 'stderr')[which]} cannot be shown any more: {error}")

    def mute(self, which: int) -> None:
        """Show no more lines of the ranks on this stream."""
        self._muted[which] = True

    def say(self, text: str) -> None:
        """Say something of our own, on stderr."""
        stream = self._streams[1]
        if stream is None:
            return
        try:
            if self.display is not None:
                for line in text.splitlines():
                    self.display.print_line(line, stream)
            else:
                stream.write(
                    text.encode(stream.encoding or "utf-8", "backslashreplace").decode(
                        stream.encoding or "utf-8"
                    )
                    + "\n"
                )
                stream.flush()
        except (OSError, ValueError):  # nobody is left to tell
            self.mute(1)

    def close(self) -> None:
        """Let go of the terminal's bar."""
        if self.display is not None:
            self.display.close()
            self.display = None

    def _write(self, stream: TextIO, fd: int | None, whole: bytes) -> None:
        if self.display is not None:
            for line in whole[:-1].decode("utf-8", "replace").split("\n"):
                if fd is None or self._has_room(fd):
                    self.display.print_line(line, stream)
        elif fd is None:
            stream.write(whole.decode("utf-8", "replace"))
            stream.flush()
        else:
            if not whole.isascii():
                whole = whole.decode("utf-8", "replace").encode(stream.encoding, "replace")
            stream.flush()
            self._write_patiently(fd, whole)

    def _write_patiently(self, fd: int, whole: bytes) -> None:
        view = memoryview(whole)
        while view and self._has_room(fd):
            view = view[os.write(fd, view[:PIECE]) :]

    def _has_room(self, fd: int) -> bool:
        """Wait until the reader takes more; False when a signal has come before: ending the job is first."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        if self._wakeup is not None:
            poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll(WHILE * 1000 if self._meanwhile else None)}
            if fd in ready:
                return True
            if ready:
                return False
            for do in self._meanwhile:
                do()


def _plain_descriptor(stream: TextIO | None) -> int | None:
    """The descriptor behind the stream if it is the real one: a notebook's stream must be written as text."""
    if stream is None or not any(stream is real for real in (sys.__stdout__, sys.__stderr__)):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _has_colour(stream: TextIO | None) -> bool:
    if stream is None or "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:
        return False

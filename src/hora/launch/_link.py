"""One rank's socket to the guard: records as JSON lines, both ways, and nobody waits for the other."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hora.launch._loop import Loop

__all__ = ["Link"]

CHUNK = 1 << 16

LAST_CHUNKS = 256
"""Reads from the socket of a rank that has ended: what it forked may write for ever."""

LONGEST_RECORD = 4 << 20
"""Bytes of one record. A longer one is passed over; so is all that a rank sends that is no record."""

MOST_WAITING = 4 << 20
"""Bytes kept for a rank that does not read, because it is stopped, say. Then its link is given up."""


class Link:
    """The supervisor's end.

    Args:
        end: the socket.
        receive: called with each record.
        complain: called with a sentence about what the rank does wrong, at most once.
        closed: called when the link is given up, by whatever side.
    """

    def __init__(
        self,
        end: socket.socket,
        loop: Loop,
        *,
        receive: Callable[[Mapping[str, Any]], None],
        complain: Callable[[str], None],
        closed: Callable[[], None],
    ) -> None:
        self._end = end
        self._loop = loop
        self._receive = receive
        self._complain = complain
        self._closed = closed
        self._complained = False
        self._came = bytearray()
        self._skipping = False
        self._going = bytearray()
        self._waits = False
        self._open = True
        end.setblocking(False)
        loop.watch(end.fileno(), self._read)

    def send(self, record: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a record as soon as the rank takes it; lost when the rank has closed its end.

        Descriptors go with it only when nothing else waits to be sent: a rank that does not read gets none,
        and its link is given up.
        """
        if not self._open:
            return
        line = json.dumps(record).encode() + b"\n"
        if descriptors:
            try:
                line = line[0 if self._going else socket.send_fds(self._end, [line], descriptors) :]
            except OSError:
                self.close()
                return
        self._going += line
        if len(self._going) > MOST_WAITING:
            self._wrong("does not read what the guard sends, so it hears nothing more")
            self.close()
        elif not self._waits:
            self._write()

    def close(self) -> None:
        """Give the link up."""
        if self._open:
            self._open = False
            self._loop.forget(self._end.fileno())
            self._end.close()
            self._closed()

    def drain(self) -> None:
        """Take in what a rank that has ended had sent."""
        for _ in range(LAST_CHUNKS):
            if not self._open or not self._read():
                return

    def _write(self) -> None:
        try:
            while self._going:
                del self._going[: self._end.send(self._going)]
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                self._loop.watch_room(self._end.fileno(), self._write)
            return
        except OSError:  # the rank has closed its end, or has ended
            self.close()
            return
        if self._waits:
            self._waits = False
            self._loop.watch_room(self._end.fileno(), None)

    def _read(self) -> bool:
        """Take in what is there; False when there was nothing, or never will be."""
        try:
            data = self._end.recv(CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # reset: the rank ended with records unread
            data = b""
        if not data:
            self.close()
            return False
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._came += line
            whole, skipped = bytes(self._came), self._skipping
            self._came.clear()
            self._skipping = False
            if not skipped and whole.strip():
                self._take(whole)
        if not self._skipping:
            self._came += rest
            if len(self._came) > LONGEST_RECORD:
                self._wrong(f"sends the guard a record of more than {LONGEST_RECORD >> 20} MB")
                self._came.clear()
                self._skipping = True
        return True

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            self._receive(record)
        else:
            self._wrong(f"sends the guard what is no record: {line[:60]!r}")

    def _wrong(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(what)

"""What the supervisor and its agent on another host say to each other, over the pipes of a remote shell.

A message is a record and some bytes. What is urgent overtakes what the workers print.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hora.launch._loop import Loop

__all__ = ["MARK", "Channel"]

MARK = b"hora-agent 1\n"
"""How an agent begins: a login script of the host may print something before."""

HEAD = struct.Struct(">II")
"""Lengths of the record and of the bytes."""

CHUNK = 1 << 18

LONGEST = 16 << 20
"""Bytes of one message; more is no message of ours."""

FULL = 1 << 18
"""Bytes of what is not urgent that wait to leave; then no more of it is taken in."""

MOST_KEPT = 64 << 20
"""Bytes that have come and nobody can react to yet; then no more are taken in."""

Receive = Callable[[Mapping[str, Any], bytes], None]


class Channel:
    """One end.

    Args:
        reader: a descriptor; the channel owns both.
        writer: another, or the same.
        receive: called with each message.
        closed: called once, when the other end has gone or speaks nonsense (then with what is wrong).
        room: called when less than :data:`FULL` waits again.
        skip: whether what comes before :data:`MARK` is passed over.

    Attributes:
        noise: the last of what was passed over, as it may tell what is wrong.
    """

    def __init__(
        self,
        reader: int,
        writer: int,
        loop: Loop,
        *,
        receive: Receive,
        closed: Callable[[str], None],
        room: Callable[[], None] = lambda: None,
        skip: bool = False,
    ) -> None:
        self.noise = b""
        self._reader, self._writer, self._loop = reader, writer, loop
        self._receive, self._closed, self._room = receive, closed, room
        self._skip = skip
        self._messages: deque[tuple[dict[str, Any], bytes]] = deque()  # that have come
        self._kept = 0  # bytes of those
        self._nonsense = False
        self._later = loop.timer(self._deliver)
        self._came = bytearray()
        self._urgent: deque[bytes] = deque()
        self._patient: deque[bytes] = deque()
        self._waiting = 0  # bytes in the latter
        self._leaving: memoryview = memoryview(b"")  # the message that is on its way
        self._writing = False
        self._waits = False
        self._open = True
        for fd in {reader, writer}:
            os.set_blocking(fd, False)
        loop.watch(reader, self._read)

    @property
    def open(self) -> bool:
        """Whether messages still come and go."""
        return self._open

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave."""
        return not (self._leaving or self._urgent or self._patient)

    @property
    def full(self) -> bool:
        """Whether what is not urgent should wait."""
        return self._waiting >= FULL

    def send(self, kind: str, payload: bytes = b"", *, patient: bool = False, **details: Any) -> None:
        """Send a message as soon as the other end takes it; lost when that has gone.

        Args:
            kind: what it is about.
            payload: bytes that go with it.
            patient: whether it stays behind those that are urgent, in its own order.
            details: the rest of the record.
        """
        if not self._open:
            return
        record = json.dumps({"kind": kind, **details}).encode()
        message = HEAD.pack(len(record), len(payload)) + record + payload
        if patient:
            self._patient.append(message)
            self._waiting += len(message)
        else:
            self._urgent.append(message)
        # A signal's handler may call this in the midst of a write, which goes on with it.
        if not self._waits and not self._writing:
            self._write()

    def close(self) -> None:
        """Hang up; what waits to leave is lost."""
        self._end(None)

    def _end(self, why: str | None) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.drop(self._later)
        self._loop.forget(self._reader)
        if self._waits:
            self._loop.watch_room(self._writer, None)
        for fd in {self._reader, self._writer}:
            os.close(fd)
        if why is not None:
            self._closed(why)

    def _write(self) -> None:
        self._writing = True
        full = self.full
        try:
            while self._leaving or self._urgent or self._patient:
                if not self._leaving:
                    if self._urgent:
                        message = self._urgent.popleft()
                    else:
                        message = self._patient.popleft()
                        self._waiting -= len(message)
                    self._leaving = memoryview(message)
                self._leaving = self._leaving[os.write(self._writer, self._leaving[:CHUNK]) :]
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                self._loop.watch_room(self._writer, self._write)
            return
        except OSError:
            self._end("")
            return
        finally:
            self._writing = False
            if full and not self.full and self._open:
                self._room()
        if self._waits:
            self._waits = False
            self._loop.watch_room(self._writer, None)

    def ahead(self, kind: str) -> None:
        """Take in what has come, but react only to messages of this kind now; to the others a little later.

        For those who wait for something else, and for so long that the other end would give them up.
        """
        if not self._open or self._kept > MOST_KEPT:
            return
        try:
            data = os.read(self._reader, CHUNK)
        except OSError:  # nothing is there, or never will be, which the loop notices
            return
        self._split(data)
        early = [message for message in self._messages if message[0]["kind"] == kind]
        if early:
            self._messages = deque(each for each in self._messages if each[0]["kind"] != kind)
        for record, payload in early:
            self._kept -= len(payload)
            self._receive(record, payload)
        self._later.at = time.monotonic()

    def _read(self) -> None:
        try:
            data = os.read(self._reader, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._split(data)
        self._deliver()
        if not data:
            self._end("")

    def _deliver(self) -> None:
        while self._open and self._messages:
            record, payload = self._messages.popleft()
            self._kept -= len(payload)
            self._receive(record, payload)
        if self._nonsense:
            self._end("it speaks another language")

    def _split(self, data: bytes) -> None:
        """Cut what has come into messages."""
        self._came += data
        if self._nonsense or (self._skip and not self._find_mark()):
            return
        start = 0
        while len(self._came) - start >= HEAD.size:
            length, more = HEAD.unpack_from(self._came, start)
            if length + more > LONGEST:
                self._nonsense = True
                return
            begin, end = start + HEAD.size, start + HEAD.size + length + more
            if len(self._came) < end:
                break
            record = _record(bytes(self._came[begin : begin + length]))
            if record is None:
                self._nonsense = True
                return
            self._messages.append((record, bytes(self._came[begin + length : end])))
            self._kept += more
            start = end
        del self._came[:start]

    def _find_mark(self) -> bool:
        at = self._came.find(MARK)
        if at < 0:
            del self._came[: max(0, len(self._came) - CHUNK)]
            self.noise = bytes(self._came[-1000:])
            return False
        del self._came[: at + len(MARK)]
        self._skip = False
        return True


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None

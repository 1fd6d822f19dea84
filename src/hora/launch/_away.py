"""A worker that runs on another host, as the supervisor handles it: its process, and its sockets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hora.guard.board import Board

__all__ = ["AwayLink", "AwayProcess", "Seat", "Send"]

Send = Callable[..., None]
"""Sends a message to the agent: :meth:`hora.launch._channel.Channel.send`."""


class AwayProcess:
    """A process on another host: what the supervisor needs of ``subprocess.Popen``.

    Args:
        number: the worker's.
        host: where it runs.
        send: to its agent.

    Attributes:
        pid: its number there; 0: not known yet.
        returncode: as of ``subprocess``; None: it has not ended.
        lost: why nobody knows how it ended: its host was lost. None: it is known.
        stdout: None: what it prints comes by messages.
        stderr: the same.
    """

    stdout = None
    stderr = None

    def __init__(self, number: int, host: str, send: Send) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.lost: str | None = None
        self.host = host
        self._number = number
        self._send = send
        self._reader, self._writer = os.pipe()

    def poll(self) -> int | None:
        """How it has ended; None: it has not."""
        return self.returncode

    def wait(self) -> int:
        """How it has ended. One of which nothing was heard is taken for killed: it is, by its agent."""
        return -signal.SIGKILL if self.returncode is None else self.returncode

    def send_signal(self, number: int) -> None:
        """Have its agent send it a signal."""
        if self.returncode is None:
            self._send("signal", worker=self._number, number=int(number))

    def kill_group(self) -> None:
        """SIGKILL to it and to all in its process group."""
        if self.returncode is None:
            self._send("kill", worker=self._number)

    def end(self, code: int, lost: str | None = None) -> None:
        """It has ended, or is as good as that."""
        if self.returncode is None:
            self.returncode, self.lost = code, lost
            os.close(self._writer)

    def end_descriptor(self) -> int:
        """A descriptor that becomes readable at its end; the caller closes it."""
        return self._reader


class AwayLink:
    """One of its sockets, with the face of :class:`hora.launch._link.Link`.

    Args:
        kind: of the messages.
        send: to its agent.
        receive: called with each record.
        closed: called when the link is given up, by whatever side.
        details: which socket it is.
    """

    def __init__(
        self,
        kind: str,
        send: Send,
        *,
        receive: Callable[[Mapping[str, Any]], None],
        closed: Callable[[], None] = lambda: None,
        **details: Any,
    ) -> None:
        self._kind, self._send, self._details = kind, send, details
        self._receive, self._closed = receive, closed
        self._open = True

    def send(self, record: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a record; descriptors stay on their host, so there are none."""
        assert not descriptors
        if self._open:
            self._send(self._kind, record=dict(record), **self._details)

    def take(self, record: Mapping[str, Any]) -> None:
        """A record has come."""
        if self._open:
            self._receive(record)

    def drain(self) -> None:
        """Nothing of it is left: records come before the news of the worker's end."""

    def close(self) -> None:
        """Give the link up."""
        if self._open:
            self._open = False
            self._send(f"{self._kind}-end", **self._details)
            self._closed()


class Seat:
    """A rank's place at the guard of one world, for a rank on another host.

    Args:
        send: to its agent.
        world: the world's number.
        worker: the worker's.
        shift: what to add to the host's ``time.monotonic()`` to have the one here.

    Attributes:
        stopped: the rank's processes that were stopped when its stack was taken: pids, and what they are.
    """

    def __init__(self, send: Send, *, world: int, worker: int, shift: Callable[[], float]) -> None:
        self.stopped: Mapping[int, str] = {}
        self._send, self._world, self._worker, self._shift = send, world, worker, shift
        self._board: Board | None = None
        self._rank = -1

    def open(
        self,
        rank: int,
        board: Board,
        *,
        receive: Callable[[Mapping[str, Any]], None],
        closed: Callable[[], None],
        stack: Callable[[str], None],
    ) -> AwayLink:
        """It is this rank from now on; see :class:`hora.launch._link.Link` for the functions."""
        self._rank, self._board, self._stack = rank, board, stack
        self.link = AwayLink(
            "guard", self._send, receive=receive, closed=closed, world=self._world, worker=self._worker
        )
        return self.link

    def close(self) -> None:
        """The guard of this world is gone."""
        self.link.close()
        self._board = None

    def ask_stack(self) -> None:
        """Have its stack taken."""
        self._send("stack", worker=self._worker)

    def take_stack(self, text: str, stopped: Mapping[int, str]) -> None:
        """Its stack has come."""
        self.stopped = stopped
        if self._board is not None:
            self._stack(text)

    def take_board(self, slot: bytes) -> None:
        """What it has written on the board of its host."""
        if self._board is not None:
            self._board.paste(self._rank, slot, shift=self._shift())

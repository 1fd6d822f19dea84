"""A worker's side of an elastic job: it hears from the supervisor which world it belongs to.

A worker is a process with a lasting number. A *world* is numbered too: which workers take part, with which
ranks. The supervisor alone forms worlds, so there are never two at a time. One thread of each worker sleeps
on a socket to the supervisor; when the world is to be left it has the engines' connections closed, so that
a collective in which the worker waits ends at once.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hora.core.errors import WorldError
from hora.core.settings import Settings
from hora.core.world import World

__all__ = ["Control", "Membership", "control"]

MOST_DESCRIPTORS = 8

AGAIN = 0.1
"""Seconds after which connections are closed anew, until the worker has left the world: it may open more."""

CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """This worker's part in one world.

    Attributes:
        number: of the world, from 0.
        place: this worker's rank in it, and the like.
        settings: those in force, with what the supervisor has opened for this world.
    """

    number: int
    place: World
    settings: Settings


class Control:
    """The connection to the supervisor.

    Args:
        fd: descriptor of the socket; the connection owns it from now on.

    Attributes:
        number: of the world that this worker is in; None: of none.
        updated: whether workers wait to be taken in, or are to leave, at the next commit.
        stopping: whether the job is to commit and stop.
    """

    def __init__(self, fd: int) -> None:
        self.number: int | None = None
        self.updated = False
        self.stopping = False
        self._pid = os.getpid()
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._answer: dict[str, Any] | None = None
        self._reset: str | None = None
        self._finished = False
        self._open = True
        self._leave: list[Callable[[], None]] = []
        self._descriptors: collections.deque[int] = collections.deque()
        self._variables: set[str] = set()
        atexit.register(self._end)
        self._thread = threading.Thread(target=self._listen, name="hora-elastic", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """Whether this is the worker itself, not what it has forked."""
        return self._open and os.getpid() == self._pid

    def join(self, settings: Settings, *, prepared: bool, **details: Any) -> Membership | None:
        """Be ready for the next world, and wait for it.

        Args:
            settings: those in force.
            prepared: whether this worker has made its model and its state, so that it can join others that
                have theirs.
            details: what the supervisor is told besides.

        Returns:
            The worker's part in it; None: others are in the midst of the training, so that this worker first
            makes what it needs by itself.

        Raises:
            WorldError: the supervisor has ended.
        """
        with self._news:
            self.number, self.updated, self._reset, self._finished = None, False, None, False
            self._leave = []
            self._news.notify_all()
        self.tell("ready", prepared=prepared, **details)
        with self._news:
            self._news.wait_for(lambda: self._answer is not None or not self._open)
            answer, self._answer = self._answer, None
        if answer is None:
            raise WorldError(
                "The launcher of this elastic job has ended.", fix="Start the job again with `hora run`."
            )
        if answer["kind"] == "alone":
            return None
        return self._membership(answer, settings)

    def on_reset(self, leave: Callable[[], None]) -> None:
        """Call this, in another thread, when the world is to be left: again and again until it has been."""
        with self._news:
            self._leave.append(leave)
            due = self._reset is not None
        if due:
            leave()

    def reset_due(self, patience: float = 0.0) -> str | None:
        """Why the world is to be left; None if it is not. Waits so many seconds for the supervisor's word."""
        if not self.active:
            return None
        with self._news:
            self._news.wait_for(lambda: self._reset is not None or not self._open, patience)
            return self._reset

    def finish(self) -> bool:
        """This worker has come to the end of the training; False if the world broke before all had."""
        self.tell("done", number=self.number)
        with self._news:
            self._news.wait_for(lambda: self._finished or self._reset is not None or not self._open)
            return self._finished

    def tell(self, kind: str, **details: Any) -> None:
        """Send a record to the supervisor; dropped when it has ended, or in a forked child."""
        if not self.active:
            return
        with self._sending, contextlib.suppress(OSError):  # the supervisor has ended: so will this worker
            self._socket.sendall(json.dumps({"kind": kind, **details}).encode() + b"\n")

    def _end(self) -> None:
        """The script has come to its end; what follows is the interpreter's."""
        if getattr(sys, "last_value", None) is None:
            self.tell("end")

    # --- what comes in --------------------------------------------------------------------------

    def _membership(self, answer: Mapping[str, Any], settings: Settings) -> Membership:
        opened = {name: answer["opened"].get(name) for name in ("store_fd", "guard_fd", "guard_board")}
        place = World(**answer["place"], source="hora")
        settings = dataclasses.replace(settings, store=answer["store"], **opened)
        variables = {
            "RANK": place.rank,
            "SIZE": place.size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.local_size,
        }
        for name, value in variables.items():  # for scripts that read them
            os.environ[f"HORA_{name}"] = os.environ[name.replace("SIZE", "WORLD_SIZE")] = str(value)
        self._set_variables(answer.get("environment", {}))
        return Membership(number=answer["number"], place=place, settings=settings)

    def _set_variables(self, wanted: Mapping[str, str]) -> None:
        """Set what the engines need in this world; what the user has set stays."""
        for name in self._variables - wanted.keys():
            os.environ.pop(name, None)
        for name, value in wanted.items():
            if name in self._variables or name not in os.environ:
                os.environ[name] = value
                self._variables.add(name)

    def _listen(self) -> None:
        rest = b""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not poll.poll(AGAIN * 1000 if self._reset is not None else None):
                self._close_connections()
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, CHUNK, MOST_DESCRIPTORS)
            except OSError:
                data, descriptors = b"", []
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._descriptors.extend(descriptors)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        with self._news:
            self._open = False
            self._news.notify_all()

    def _hear(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        with self._news:
            if kind in ("world", "alone"):
                if kind == "world":
                    self.number = record["number"]
                    record["opened"] = {name: self._descriptors.popleft() for name in record["opens"]}
                self._answer = record
            elif kind == "stop":
                self.stopping = True
            elif record["number"] != self.number:
                return  # of a world that this worker has left
            elif kind == "reset":
                self._reset = record["reason"]
            elif kind == "updated":
                self.updated = True
            elif kind == "finish":
                self._finished = True
            self._news.notify_all()
        if kind == "reset":
            self._close_connections()

    def _close_connections(self) -> None:
        for leave in list(self._leave):
            leave()


_control: Control | None = None


def control(settings: Settings) -> Control | None:
    """This worker's connection, when it belongs to an elastic job."""
    global _control
    if settings.elastic_fd is None:
        return None
    if _control is None:
        _control = Control(settings.elastic_fd)
    return _control if _control.active else None

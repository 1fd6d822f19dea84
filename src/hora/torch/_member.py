"""A worker's part in the worlds of an elastic job, as ``init()`` needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from hora.adapter import guard
from hora.core.elastic import Control, control
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch import _rendezvous
from hora.torch._connections import Connections, shut
from hora.torch.engines import Group

__all__ = ["Member", "join", "meeting", "prepare"]

PATIENCE = 5.0
"""Seconds in which the supervisor tells that a worker is gone, once another has lost a connection to it."""

_prepared = False
_frozen = False
_details: Callable[[], dict[str, int]] = dict


class Member:
    """What ``init()`` was told.

    Attributes:
        control: the connection to the supervisor.
        number: of the world; -1: none, this worker prepares by itself.
        place: this worker's place in it.
        settings: those in force.
        connections: the engines', closed when the world is to be left.
    """

    def __init__(self, control: Control, number: int, place: World, settings: Settings) -> None:
        self.control = control
        self.number = number
        self.place = place
        self.settings = settings
        self.connections = Connections()
        self._listens = False

    @property
    def alone(self) -> bool:
        """Whether this worker is in no world yet."""
        return self.number < 0

    def close(self) -> None:
        """End every collective and every exchange with the store in which this worker waits."""
        self.connections.close()
        if self.settings.store is not None:
            _close_store(self.settings.store)

    def listen(self) -> None:
        """From now on the supervisor's word ends what this worker waits for."""
        if not self.alone and not self._listens:
            self._listens = True
            self.control.on_reset(self.close)

    @contextlib.contextmanager
    def making(self) -> Iterator[list[dist.ProcessGroup]]:
        """Groups of this world are made while the block runs; it puts them into the list."""
        made: list[dist.ProcessGroup] = []
        with self.connections.made():
            yield made
        self.connections.groups += [weakref.ref(group) for group in made if isinstance(group, Group)]
        if self.control.reset_due() is not None:
            self.close()

    def break_off(self) -> None:
        """The world is about to be left: what is still under way in a broken one is not waited for."""
        if self.control.reset_due() is not None:
            self.close()

    def leave(self) -> None:
        """The world has been left: give up what the supervisor had opened for it."""
        known = self.settings.store is not None and _rendezvous.forget_store(self.settings.store)
        guard.disconnect()
        for descriptor in (self.settings.guard_board, None if known else self.settings.store_fd):
            if descriptor is not None and not self.alone:
                os.close(descriptor)

    def is_breaking(self) -> bool:
        """After an error: whether it comes from the end of the world; its word may be on the way."""
        return self.control.reset_due(PATIENCE) is not None

    def is_lost(self) -> bool:
        """After an error: whether the world broke, so that there will be another, and this one is left."""
        if not self.is_breaking():
            return False
        self.leave()
        return True


def prepare(details: Callable[[], dict[str, int]]) -> None:
    """From now on this worker has a state: it can join others; ``details`` tells about it."""
    global _prepared, _details
    _prepared, _details = True, details


def join(settings: Settings) -> Member | None:
    """Wait for the next world of an elastic job; None in others."""
    global _frozen
    connection = control(settings)
    if connection is None:
        return None
    if not _frozen:
        # What has been imported stays; left out, a collection at a reset takes milliseconds.
        gc.collect()
        gc.freeze()
        _frozen = True
    found = connection.join(settings, prepared=_prepared, **_details())
    if found is None:
        return Member(connection, -1, World(source="hora"), settings)
    return Member(connection, found.number, found.place, found.settings)


@contextlib.contextmanager
def meeting(member: Member | None) -> Iterator[list[dist.ProcessGroup]]:
    """The ranks meet while the block runs; a world that breaks meanwhile ends the wait with an error."""
    if member is None:
        yield []
        return
    member.listen()
    with member.making() as made:
        yield made


def _close_store(url: str) -> None:
    """Shut down this process's connections to the store, which is waited for without an end."""
    port = urlsplit(url).port
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed by now, or never connected
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getpeername()[1] == port:
                    shut(fd)

"""A worker on another host, as its agent there handles it: what it prints, its sockets, stack and board."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from hora.guard.board import Board
from hora.launch import _tree
from hora.launch._channel import Channel
from hora.launch._children import stopped
from hora.launch._elastic_workers import ElasticStarter
from hora.launch._guard import Ends
from hora.launch._link import Link
from hora.launch._loop import Loop
from hora.launch._stacks import Stacks
from hora.launch._start import Starter

__all__ = ["AgentWorker", "Begun", "World", "fixed", "free"]

CHUNK = 1 << 16

LAST_CHUNKS = 64
"""Reads from the pipe of a worker that has ended: more than it holds; what was forked may write for ever."""


class World:
    """What the workers of this host share in one world.

    Args:
        number: of the world.
        size: its number of ranks.
        guarded: whether the guard watches it.
    """

    def __init__(self, number: int, size: int, *, guarded: bool) -> None:
        self.number = number
        self.fd = Board.make(size) if guarded else -1
        self.board = Board(self.fd, size) if guarded else None
        self._shown: dict[int, bytes] = {}

    def copy(self, worker: AgentWorker) -> bytes | None:
        """What a worker has on the board, made small; None when it is the same as the last time."""
        found = None if self.board is None else self.board.copy(worker.rank)
        if found is None or found == self._shown.get(worker.rank):
            return None
        self._shown[worker.rank] = found
        return zlib.compress(found, 1)

    def close(self) -> None:
        """Another has begun."""
        if self.board is not None:
            self.board.close()
            self.board = None
            os.close(self.fd)


class Begun(NamedTuple):
    """A process that was started.

    Attributes:
        process: it.
        control: to its half of :mod:`hora.core.elastic`; None: it belongs to no elastic job.
        guard: to its half of the guard; None: it gets that with each world, or there is none.
        reader: of the pipe on which it writes its stack.
        writer: the number of that pipe's other end in the process.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket | None
    guard: socket.socket | None
    reader: int
    writer: int


def free(starter: ElasticStarter, number: int) -> Begun:
    """Start a worker whose place in the world is told later."""
    process, control, (reader, writer) = starter.begin(number)
    return Begun(process, control, None, reader, writer)


def fixed(starter: Starter, number: int, world: World) -> Begun:
    """Start a worker whose place is in its environment."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    inherited = [writer]
    environment = {}
    if world.board is not None:
        inherited += [theirs.fileno(), world.fd]
        environment = {"HORA_GUARD_FD": str(theirs.fileno()), "HORA_GUARD_BOARD": str(world.fd)}
    try:
        process = starter.start(number, Ends(environment=environment, inherited=inherited, stack=writer))
    except BaseException:
        ours.close()
        os.close(reader)
        raise
    finally:
        theirs.close()
        os.close(writer)
    if world.board is None:
        ours.close()
    return Begun(process, None, None if world.board is None else ours, reader, writer)


class AgentWorker:
    """One process.

    Args:
        number: the worker's, which lasts.
        begun: it.
        fresh: called before a record of the guard's goes out: the board is to be as new as it is.

    Attributes:
        process: it.
        world: the one that it is in, or was in last.
        rank: in that.
        ended: whether it has ended.
    """

    def __init__(
        self,
        number: int,
        begun: Begun,
        loop: Loop,
        channel: Channel,
        stacks: Stacks,
        *,
        fresh: Callable[[AgentWorker], None],
    ) -> None:
        self.number = number
        self.world: World | None = None
        self.rank = -1
        self.ended = False
        self._loop, self._channel, self._stacks, self._fresh = loop, channel, stacks, fresh
        self._guard: tuple[int, Link] | None = None
        self.process = begun.process
        self._begun = begun
        stacks.add(number, self.process, begun.reader, writer=begun.writer)
        self._link: Link | None = None
        if begun.control is not None:
            self._link = Link(
                begun.control,
                loop,
                receive=lambda record: channel.send("control", worker=number, record=dict(record)),
                complain=self._complain,
                closed=lambda: None,
            )
        both = enumerate((self.process.stdout, self.process.stderr))
        self._pipes: dict[int, IO[bytes]] = {which: pipe for which, pipe in both if pipe is not None}
        self._watched: set[int] = set()
        self.go_on()

    def take_part(self, world: World, rank: int) -> None:
        """It belongs to the job's only world, as its environment tells it."""
        self.world, self.rank = world, rank
        if self._begun.guard is not None:
            self._guard = (world.number, self._guard_link(self._begun.guard, world.number))

    def tell(self, record: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Something about the worlds."""
        if self._link is not None:
            self._link.send(record, descriptors)

    def join(self, world: World, rank: int, record: Mapping[str, Any], store: socket.socket | None) -> None:
        """It belongs to a world now: tell it, with what is its own there."""
        self.guard_close()
        self.world, self.rank = world, rank
        opens = {}
        theirs = None
        if world.board is not None:
            ours, theirs = socket.socketpair()
            self._guard = (world.number, self._guard_link(ours, world.number))
            opens = {"guard_fd": theirs.fileno(), "guard_board": world.fd}
        if store is not None:
            opens["store_fd"] = store.fileno()
        self.tell({**record, "opens": list(opens)}, list(opens.values()))
        if theirs is not None:
            theirs.close()

    def _guard_link(self, end: socket.socket, world: int) -> Link:
        def receive(record: Mapping[str, Any]) -> None:
            self._fresh(self)
            self._channel.send("guard", worker=self.number, world=world, record=dict(record))

        def closed() -> None:
            self._channel.send("guard-end", worker=self.number, world=world)

        return Link(end, self._loop, receive=receive, complain=self._complain, closed=closed)

    def guard_send(self, world: int, record: Mapping[str, Any]) -> None:
        """A record of the guard's for the rank that it is in this world."""
        if self._guard is not None and self._guard[0] == world:
            self._guard[1].send(record)

    def guard_close(self, world: int | None = None) -> None:
        """The guard hangs up, that of this world or any."""
        if self._guard is not None and world in (None, self._guard[0]):
            link = self._guard[1]
            self._guard = None
            link.close()

    def stopped_children(self) -> dict[int, str]:
        """The processes that it has started and that are stopped."""
        return {child.pid: str(child) for child in stopped(self.process.pid)}

    def finish(self) -> None:
        """It has ended: hand on what it has left, and end what it has started."""
        for which in (0, 1):
            for _ in range(LAST_CHUNKS):
                if which not in self._pipes or not self._read(which):
                    break
        for which in list(self._pipes):
            self._close(which)
        if self._link is not None:
            self._link.drain()
            self._link.close()
        if self._guard is not None:
            self._guard[1].drain()
        self._fresh(self)
        self.guard_close()
        _tree.kill_group(self.process)
        self._stacks.remove(self.number)
        self.ended = True

    def go_on(self) -> None:
        """Take in what it prints, from now on or again."""
        for which, pipe in self._pipes.items():
            if which not in self._watched:
                self._watched.add(which)
                self._loop.watch(pipe.fileno(), functools.partial(self._on_output, which))

    def _on_output(self, which: int) -> None:
        if not self._channel.full:
            self._read(which)
            return
        # It waits in its own write now, as anything does whose output is not read.
        self._watched.discard(which)
        self._loop.forget(self._pipes[which].fileno())

    def _read(self, which: int) -> bool:
        """Hand on what is there; False when the pipe is empty or at its end."""
        try:
            data = os.read(self._pipes[which].fileno(), CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(which)
            return False
        self._channel.send("output", data, patient=True, worker=self.number, which=which)
        return True

    def _close(self, which: int) -> None:
        pipe = self._pipes.pop(which)
        if which in self._watched:
            self._watched.discard(which)
            self._loop.forget(pipe.fileno())
        pipe.close()

    def _complain(self, what: str) -> None:
        self._channel.send("complain", text=f"worker {self.number} {what}")

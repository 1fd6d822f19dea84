"""The coordinator: a thread of rank 0 that hears what every rank asks for and says what runs when.

It sleeps until something arrives; there is no cycle. While rank 0's executor is busy, operations that
become ready are kept, and released together when it is idle: the busier the engine, the larger the
batches, and a lone operation never waits.

Rank 0 itself asks by calling :meth:`Coordinator.tell`, which saves two changes of threads per operation;
everything is under one lock. Every rank holds two connections. On *control* it is told what to run, and
the other ranks ask. On *alarm* it is told only that a rank is gone, so that it hears of it even while its
executor is stuck in the engine. Messages are lines of JSON; a connection starts with the job's token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hora.adapter.negotiation.match import Answer, Ask, Fail, Joined, Run, SetChange, Table
from hora.adapter.negotiation.options import Options
from hora.adapter.negotiation.timeline import Trace

__all__ = ["Coordinator"]

CHUNK = 1 << 16


@dataclass(eq=False)
class _Peer:
    socket: socket.socket
    rank: int = -1
    alarm: bool = False
    received: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    news: list[list[Any]] = field(default_factory=list)
    left: bool = False


class Coordinator:
    """Runs until all ranks have left, which may be long after rank 0 has shut down.

    Attributes:
        port: where the other ranks connect.
        token: what they say first.
    """

    def __init__(self, table: Table, options: Options, trace: Trace, *, address: str) -> None:
        self._size = size = table.size
        self._options = options
        self._trace = trace
        self._table = table
        self._queue: list[Answer] = []
        self._busy = False
        self._selector = selectors.DefaultSelector()
        self._control: dict[int, _Peer] = {}
        self._alarm: dict[int, _Peer] = {}
        self.token = secrets.token_hex(16)
        self._server = socket.create_server((address, 0), backlog=max(128, 2 * size))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._stopping = False
        self._doomed = False
        self._bell, self._listening = socket.socketpair()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hora-coordinator", daemon=True)

    def attach(self) -> tuple[socket.socket, socket.socket]:
        """Rank 0's own ends of its control and alarm connections."""
        ends = []
        for alarm in (False, True):
            mine, theirs = socket.socketpair()
            self._welcome(_Peer(mine, rank=0, alarm=alarm))
            ends.append(theirs)
        return ends[0], ends[1]

    def start(self) -> None:
        self._flush()  # rank 0 alone is everyone already
        self._thread.start()

    def tell(self, message: list[Any]) -> None:
        """Rank 0 says something."""
        with self._lock:
            self._hear(self._control[0], message)
            self._release()
            self._flush()
            if message[0] == "bye":
                self._ring()

    def wake(self) -> None:
        """Look at the clock: an operation of rank 0 may have been asked for since the last look."""
        with self._lock:
            self._ring()

    def stop(self) -> None:
        """Rank 0 fails, and the coordinator with it: tell the others and end."""
        with self._lock:
            self._doomed = True
            self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._bell.send(b"!")

    def join(self) -> None:
        """Wait until the thread has ended, which it does when all ranks have left."""
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping and not self._all_left():
                self._turn()
        finally:
            for peer in (*self._control.values(), *self._alarm.values()):
                with contextlib.suppress(OSError):
                    peer.socket.setblocking(True)
                    peer.socket.settimeout(1.0)
                    peer.socket.sendall(peer.unsent)
                peer.socket.close()
            for end in (self._server, self._bell, self._listening):
                end.close()
            self._selector.close()

    def _all_left(self) -> bool:
        return len(self._control) == self._size and all(peer.left for peer in self._control.values())

    def _turn(self) -> None:
        with self._lock:
            patience = self._patience()
        ready = self._selector.select(patience)
        with self._lock:
            self._serve(ready)

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for selected, events in ready:
            peer: _Peer | None = selected.data
            if selected.fileobj is self._listening:
                self._listening.recv(CHUNK)
                if self._doomed:
                    self._end()
                    return
                continue
            if peer is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._write(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
        self._look_for_stalls()
        self._release()
        self._flush()

    def _flush(self) -> None:
        for peer in list(self._control.values()):
            if peer.news:
                self._send(peer, peer.news)
                peer.news = []

    # --- connections ----------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
            connection.setblocking(False)

    def _welcome(self, peer: _Peer) -> None:
        peer.socket.setblocking(False)
        (self._alarm if peer.alarm else self._control)[peer.rank] = peer
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.socket)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        if len(self._control) == len(self._alarm) == self._size:
            # Nobody leaves init before all can be reached.
            for member in self._control.values():
                member.news.append(["ready"])

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            if peer.rank < 0:
                if not self._greet(peer, line):
                    return
            else:
                self._hear(peer, json.loads(line))

    def _greet(self, peer: _Peer, line: bytes) -> bool:
        """A stranger's connection is closed and does nothing else."""
        token, _, rest = line.partition(b" ")
        if not hmac.compare_digest(token, self.token.encode()):
            self._selector.unregister(peer.socket)
            peer.socket.close()
            return False
        rank, alarm = json.loads(rest)
        peer.rank, peer.alarm = rank, alarm
        self._welcome(peer)
        return True

    def _drop(self, peer: _Peer) -> None:
        """A connection has ended; without a good-bye its rank is lost, and the others hear at once."""
        self._selector.unregister(peer.socket)
        if peer.rank >= 0 and not peer.alarm and not peer.left:
            peer.left = True
            text = f"Rank {peer.rank} is gone: its process ended without hvd.shutdown()."
            for other in self._alarm.values():
                if other.rank != peer.rank:
                    self._send(other, [["lost", text]])
            self._answer(self._table.leave(peer.rank, text))
        peer.socket.close()

    def _send(self, peer: _Peer, message: Any) -> None:
        peer.unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            sent = peer.socket.send(peer.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # its end is noticed by reading
            sent = len(peer.unsent)
        del peer.unsent[:sent]
        if peer.socket.fileno() >= 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            with contextlib.suppress(KeyError):
                self._selector.modify(peer.socket, events, peer)

    # --- operations -----------------------------------------------------------------------------

    def _hear(self, peer: _Peer, message: list[Any]) -> None:
        match message:
            case ["ask", set_id, name, fields]:
                self._trace.asked((set_id, name))
                self._answer(self._table.ask(peer.rank, (set_id, name), Ask.from_wire(fields)))
            case ["idle"]:
                self._busy = False
            case ["join"]:
                self._answer(self._table.join(peer.rank))
            case ["bye"]:
                peer.left = True
                self._busy = self._busy and peer.rank != 0
                text = (
                    f"Horovod has been shut down: rank {peer.rank} called hvd.shutdown() or ended, "
                    "while this rank still asked for a collective with it."
                )
                self._answer(self._table.leave(peer.rank, text))
            case _:
                raise ValueError(f"unknown message {message!r}")

    def _end(self) -> None:
        self._stopping = True
        text = "Rank 0 is gone, and the coordinator with it."
        for peer in self._control.values():
            if not peer.left:
                self._send(peer, [*peer.news, ["end", text]])

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, Fail):
                for rank in answer.ranks:
                    self._control[rank].news.append(["fail", *answer.key, answer.text, answer.echo])
            elif isinstance(answer, Run) and 0 not in answer.members and self._independent(answer):
                self._tell_run([answer])
            else:
                self._queue.append(answer)

    def _independent(self, run: Run) -> bool:
        """Whether the run overtakes nothing that its members wait for."""
        return all(
            isinstance(other, Run) and not set(other.members) & set(run.members) for other in self._queue
        )

    def _release(self) -> None:
        if self._busy or not self._queue:
            return
        queue, self._queue = self._queue, []
        for group in fuse(queue, limit=self._options.fusion_bytes):
            if isinstance(group, list):
                self._tell_run(group)
                self._busy = self._busy or 0 in group[0].members
            elif isinstance(group, Joined):
                for peer in self._control.values():
                    peer.news.append(["joined", group.last])
            elif isinstance(group, SetChange):
                for peer in self._control.values():
                    peer.news.append(["set", *group.key, group.ranks])

    def _tell_run(self, group: list[Run]) -> None:
        self._trace.released([(run.key, run.ask.kind) for run in group])
        for rank in group[0].members:
            items = [
                [*run.key, run.rows if rank not in run.absent else None, run.ask if run.absent else None]
                for run in group
            ]
            self._control[rank].news.append(["run", items])

    # --- stalls ---------------------------------------------------------------------------------

    def _patience(self) -> float | None:
        deadlines = []
        if self._options.stall_check:
            deadlines.append(self._table.next_deadline(self._options.stall_warning))
            oldest = self._table.oldest()
            if self._options.stall_shutdown > 0 and oldest is not None:
                deadlines.append(oldest + self._options.stall_shutdown)
        found = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(found) - time.monotonic()) if found else None

    def _look_for_stalls(self) -> None:
        if not self._options.stall_check:
            return
        late = self._table.overdue(self._options.stall_warning)
        if late:
            lines = [f"  {name} [missing ranks: {', '.join(map(str, ranks))}]" for name, ranks in late]
            _say(
                f"hora: stall: {len(late)} operation{'s' if len(late) > 1 else ''} waited longer than "
                f"{self._options.stall_warning:g} s, asked for by some ranks and not by others. Either they "
                "ask for different operations (then look at what the missing ranks do instead), or they are "
                "slow.\nStalled operations:\n" + "\n".join(lines)
            )
        oldest = self._table.oldest()
        limit = self._options.stall_shutdown
        if limit > 0 and oldest is not None and time.monotonic() >= oldest + limit:
            text = f"An operation stalled for more than {limit:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)."
            _say(f"hora: stall: {text}")
            self._answer(self._table.abandon(limit, text))


def fuse(answers: Sequence[Answer], *, limit: int) -> list[list[Run] | Answer]:
    """Join runs that can be one operation of the engine, up to ``limit`` bytes together.

    A run joins an earlier one of its kind, so on each member the order stays the same for all.
    """
    groups: list[list[Run] | Answer] = []
    open_groups: dict[tuple[Any, ...], tuple[list[Run], int]] = {}
    for answer in answers:
        if not isinstance(answer, Run):
            groups.append(answer)
            open_groups.clear()  # nothing overtakes a change of process sets, or a join
            continue
        ask = answer.ask
        size = ask.bytes_estimate()
        alike = (answer.members, ask.kind, ask.op, ask.prescale, ask.postscale, ask.root, ask.device)
        fusible = ask.kind in ("allreduce", "broadcast") and ask.op != "adasum" and not ask.grouped
        found = open_groups.get((*alike, answer.key[0])) if fusible else None
        if found is not None and found[1] + size <= limit:
            found[0].append(answer)
            open_groups[(*alike, answer.key[0])] = (found[0], found[1] + size)
            continue
        group = [answer]
        groups.append(group)
        if fusible and size <= limit:
            open_groups[(*alike, answer.key[0])] = (group, size)
    return groups


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

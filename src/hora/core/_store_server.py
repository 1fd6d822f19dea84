"""The server of :mod:`hora.core.store`: one thread of rank 0, which keeps bytes for the ranks.

It never looks into the values, and allocates nothing for who has not shown that it is a rank of this job.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

from hora.core import _store_wire as wire
from hora.core._store_peers import Peer, Swap
from hora.core.plural import plural

__all__ = ["Server"]

MOST_PARTS = 64
"""Of one call of sendmsg: Linux takes 1024."""

DEAF = 0.1
"""Seconds without new connections when there is no descriptor left for one."""

GREETING_PATIENCE = 10.0
"""Seconds in which a connection must say who it is: ranks do so at once."""

FLUSH_PATIENCE = 5.0
"""Seconds in which answers leave when the server ends; a rank that is stopped reads none."""

MOST_REPORTS = 5
"""Strange connections that are told of; a scanner opens thousands."""


class Server:
    """Serves one job's ranks until :meth:`close`.

    Args:
        listener: bound and listening; the server owns it from now on. None: only :meth:`attach`.
        size: number of ranks.
        token: equal for the ranks of one job.
    """

    def __init__(self, listener: socket.socket | None, *, size: int, token: bytes) -> None:
        self._listener = listener
        self._size = size
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._wake, self._alarm = socket.socketpair()
        self._attached: collections.deque[socket.socket] = collections.deque()
        self._closing: float | None = None
        self._deaf: float | None = None
        self._reports = 0
        self._values: dict[str, bytes] = {}
        self._gets: dict[str, list[tuple[Peer, float]]] = {}
        self._swaps: dict[str, Swap] = {}
        self._peers: set[Peer] = set()
        self._gone: set[int] = set()
        for link in (self._wake, self._alarm, listener):
            if link is not None:
                link.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hora-store", daemon=True)
        self._thread.start()

    def attach(self) -> socket.socket:
        """A connection from inside the process."""
        ours, theirs = socket.socketpair()
        self._attached.append(ours)
        self._ring()
        return theirs

    def close(self) -> None:
        """End, after what has been answered has left."""
        self._closing = time.monotonic() + FLUSH_PATIENCE
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """In a forked child: give up the copies of the descriptors, without a word to anybody."""
        self._selector.close()
        for link in (self._wake, self._alarm, self._listener, *(peer.link for peer in self._peers)):
            if link is not None:
                link.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is awake anyway, or has ended
            self._alarm.send(b"\0")

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._has_ended():
                for key, events in self._selector.select(self._pause()):
                    if key.fileobj is self._wake:
                        self._awake()
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        if events & selectors.EVENT_WRITE:
                            self._flush(key.data)
                        if events & selectors.EVENT_READ:
                            self._read(key.data)
                self._expire(time.monotonic())
        finally:
            self._selector.close()
            for link in (self._wake, self._alarm, self._listener, *(peer.link for peer in self._peers)):
                if link is not None:
                    link.close()

    def _has_ended(self) -> bool:
        if self._closing is None:
            return False
        return time.monotonic() >= self._closing or not any(peer.outbox for peer in self._peers)

    def _pause(self) -> float | None:
        deadlines = [swap.deadline for swap in self._swaps.values()]
        deadlines += [deadline for waiting in self._gets.values() for _, deadline in waiting]
        deadlines += [peer.deadline for peer in self._peers if peer.rank < 0]
        deadlines += [due for due in (self._closing, self._deaf) if due is not None]
        nearest = min(deadlines, default=float("inf"))
        return None if nearest == float("inf") else max(0.0, nearest - time.monotonic())

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(wire.CHUNK)
        while self._attached:
            self._add(self._attached.popleft(), "this process")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            link, address = self._listener.accept()
        except OSError as error:  # it hung up at once, or there is no descriptor left
            self._report(f"a connection to the store of this job could not be taken: {error}.")
            self._selector.unregister(self._listener)
            self._deaf = time.monotonic() + DEAF
            return
        wire.nodelay(link)
        self._add(link, f"{address[0]}:{address[1]}" if address else "this host")

    def _add(self, link: socket.socket, origin: str) -> None:
        link.setblocking(False)
        peer = Peer(link, origin, deadline=time.monotonic() + GREETING_PATIENCE)
        self._peers.add(peer)
        self._selector.register(link, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        if not peer.is_open:
            return
        try:
            data = peer.link.recv(wire.CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if peer.rank < 0 and peer.inbox:
                self._strange(peer)
            self._lose(peer)
            return
        peer.inbox += data
        while (
            peer.is_open
            and not peer.leaves
            and (self._request(peer) if peer.rank >= 0 else self._greet(peer))
        ):
            continue

    def _greet(self, peer: Peer) -> bool:
        """Take the first bytes of a connection; whether they were all there."""
        begin = bytes(peer.inbox[: len(wire.MAGIC)])
        if begin != wire.MAGIC[: len(begin)]:
            self._strange(peer)
            self._lose(peer)
            return False
        if len(peer.inbox) < wire.HELLO.size:
            return False
        _, rank, size, client, token = wire.HELLO.unpack_from(peer.inbox)
        del peer.inbox[: wire.HELLO.size]
        refusal = self._refusal(rank, size, client, token)
        if refusal is not None:
            peer.leaves = True
            self._answer(peer, wire.WRONG, refusal.encode())
            return False
        peer.rank, peer.client = rank, client
        self._gone.discard(rank)
        self._answer(peer, wire.OK)
        return True

    def _refusal(self, rank: int, size: int, client: bytes, token: bytes) -> str | None:
        if token != self._token:
            return "Another job listens there."
        if size != self._size:
            return f"This worker says that there are {size} ranks, and rank 0 says {self._size}."
        if rank >= size:
            return f"There is no rank {rank} among {size}."
        if any(other.rank == rank and other.client != client for other in self._peers):
            return f"Two workers say that they are rank {rank}."
        return None

    def _request(self, peer: Peer) -> bool:
        """Take one request; whether it was all there."""
        inbox = peer.inbox
        if len(inbox) < wire.REQUEST.size:
            return False
        operation, in_key, seconds, index, count, in_value = wire.REQUEST.unpack_from(inbox)
        if (
            in_key > wire.MOST_KEY
            or in_value > wire.MOST_VALUE
            or count > self._size
            or operation not in (wire.SET, wire.GET, wire.SWAP)
        ):
            self._strange(peer)
            self._lose(peer)
            return False
        whole = wire.REQUEST.size + in_key + 4 * count + in_value
        if len(inbox) < whole:
            return False
        with memoryview(inbox) as view:
            key = bytes(view[wire.REQUEST.size : wire.REQUEST.size + in_key]).decode(errors="replace")
            members = struct.unpack_from(f"!{count}I", view, wire.REQUEST.size + in_key)
            value = bytes(view[whole - in_value : whole])
        del inbox[:whole]
        deadline = time.monotonic() + seconds
        if operation == wire.SET:
            self._values[key] = value
            self._answer(peer, wire.OK)
            for waiting, _ in self._gets.pop(key, ()):
                self._answer(waiting, wire.OK, value)
        elif operation == wire.GET and key in self._values:
            self._answer(peer, wire.OK, self._values[key])
        elif operation == wire.GET:
            self._gets.setdefault(key, []).append((peer, deadline))
        else:
            self._swap(peer, key, value, index, members, deadline=deadline, seconds=seconds)
        return True

    def _swap(
        self,
        peer: Peer,
        key: str,
        value: bytes,
        index: int,
        members: tuple[int, ...],
        *,
        deadline: float,
        seconds: float,
    ) -> None:
        if not index < len(members) or members[index] != peer.rank:
            self._answer(
                peer, wire.WRONG, f"Rank {peer.rank} is not number {index} of {list(members)}.".encode()
            )
            return
        swap = self._swaps.get(key)
        if swap is None:
            swap = self._swaps[key] = Swap(members, deadline, seconds)
        elif swap.members != members or index in swap.values:
            wrong = (
                f"Rank {peer.rank} came twice"
                if swap.members == members
                else f"Rank {peer.rank} exchanges among {list(members)}, others among {list(swap.members)}"
            )
            swap.waiting[len(swap.waiting) + self._size] = peer
            self._break(key, wire.WRONG, f"{wrong}.")
            return
        elif deadline < swap.deadline:
            swap.deadline, swap.seconds = deadline, seconds
        swap.values[index] = value
        swap.waiting[index] = peer
        missing = swap.missing()
        if not missing:
            del self._swaps[key]
            values = [swap.values[place] for place in range(len(members))]
            body = [part for one in values for part in (len(one).to_bytes(8, "big"), one)]
            # Rank 0 last: it may end the process as soon as it has its answer.
            for other in sorted(swap.waiting.values(), key=lambda one: -one.rank):
                self._answer(other, wire.OK, *body)
        elif self._gone.intersection(missing):
            self._break(key, wire.GONE, _named(sorted(self._gone.intersection(missing))))

    def _break(self, key: str, status: int, text: str) -> None:
        """Give an exchange up: all who wait in it are told."""
        for peer in list(self._swaps.pop(key).waiting.values()):
            self._answer(peer, status, text.encode())

    def _expire(self, now: float) -> None:
        if self._deaf is not None and self._deaf <= now and self._listener is not None:
            self._deaf = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, swap in [(key, swap) for key, swap in self._swaps.items() if swap.deadline <= now]:
            if key in self._swaps:
                self._break(key, wire.LATE, f"{_named(swap.missing())}|{swap.seconds:g}")
        for key, waiting in list(self._gets.items()):
            late = [peer for peer, deadline in waiting if deadline <= now]
            self._gets[key] = [entry for entry in waiting if entry[1] > now]
            if not self._gets[key]:
                del self._gets[key]
            for peer in late:
                self._answer(peer, wire.LATE)
        for peer in [peer for peer in self._peers if peer.rank < 0 and peer.deadline <= now]:
            if not peer.leaves:
                self._strange(peer)
            self._lose(peer)

    def _answer(self, peer: Peer, status: int, *parts: bytes) -> None:
        if not peer.is_open:
            return
        peer.outbox.append(memoryview(wire.REPLY.pack(status, sum(map(len, parts)))))
        peer.outbox.extend(memoryview(part) for part in parts if part)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        full = False
        try:
            while peer.outbox and peer.is_open:
                sent = peer.link.sendmsg(list(itertools.islice(peer.outbox, MOST_PARTS)))
                while sent:
                    first = peer.outbox.popleft()
                    if sent < len(first):
                        peer.outbox.appendleft(first[sent:])
                    sent -= min(sent, len(first))
        except BlockingIOError:
            full = True
        except OSError:
            peer.leaves = True
        if peer.leaves and not full:
            self._lose(peer)
        elif full != peer.is_full:
            peer.is_full = full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0)
            self._selector.modify(peer.link, events, peer)

    def _lose(self, peer: Peer) -> None:
        """A connection has ended; with the last one of a rank, the rank has."""
        if not peer.is_open:
            return
        peer.is_open = False
        peer.outbox.clear()
        self._peers.discard(peer)
        self._selector.unregister(peer.link)
        peer.link.close()
        for key, waiting in list(self._gets.items()):
            self._gets[key] = [entry for entry in waiting if entry[0] is not peer]
            if not self._gets[key]:
                del self._gets[key]
        if peer.rank < 0 or any(other.rank == peer.rank for other in self._peers):
            return
        self._gone.add(peer.rank)
        for key, swap in list(self._swaps.items()):
            if key in self._swaps and peer.rank in swap.missing():
                self._break(key, wire.GONE, _named([peer.rank]))

    def _strange(self, peer: Peer) -> None:
        who = f"rank {peer.rank}" if peer.rank >= 0 else "no rank of this job"
        begin = bytes(peer.inbox[:24])
        said = f"it sent {begin!r}" if begin else f"it said nothing for {GREETING_PATIENCE:g} s"
        self._report(
            f"a connection from {peer.origin} to the store of this job was closed: {said}, as {who}."
        )

    def _report(self, text: str) -> None:
        self._reports += 1
        if self._reports <= MOST_REPORTS:
            more = " Others like it are not told of." if self._reports == MOST_REPORTS else ""
            print(f"hora: {text}{more}", file=sys.stderr, flush=True)


def _named(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'Rank')} {', '.join(map(str, ranks))}"

"""Bytes between the ranks without a framework: how they tell each other addresses, shapes and small objects.

Rank 0 serves in a thread; the others, and itself, ask over one connection each. The server waits for what
is not there yet, so that each call is one round trip. When a rank ends, those who wait for it hear of it at
once; when rank 0 ends, all do.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from hora.core import _store_wire as wire
from hora.core._store_server import Server
from hora.core.errors import UsageError, WorldError

__all__ = ["Alone", "RankGone", "Store"]

GRACE = 5.0
"""Seconds beyond those of a request after which a server that does not answer is given up: it is stopped."""


class RankGone(WorldError):
    """A rank that is waited for has ended, or rank 0, which serves the store."""

    slug = "world"


class Store:
    """This rank's side of the store. Made by :meth:`serve` on rank 0 and by :meth:`connect` on the others.

    Several threads may use it at the same time. A forked child cannot.

    Attributes:
        timeout: seconds that a call waits unless told otherwise.
    """

    def __init__(self, open_link: Callable[[float], socket.socket], *, timeout: float, where: str) -> None:
        self.timeout = timeout
        self._where = where
        self._open_link = open_link
        self._served: Server | None = None
        self._idle: list[socket.socket] = []
        self._links: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ended = ""
        self._met = False
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    @classmethod
    def serve(
        cls, listener: socket.socket, *, size: int, timeout: float, rank: int = 0, token: bytes = b""
    ) -> Store:
        """The store of the rank that serves it, rank 0.

        Args:
            listener: bound and listening; the store owns it from now on.
            size: number of ranks.
            timeout: seconds that a call waits unless told otherwise.
            rank: this rank.
            token: up to 16 bytes, equal for the ranks of one job; those of another job are sent away.
        """
        served = Server(listener, size=size, token=wire.padded(token))
        greeting = wire.greeting(rank, size, token)
        store = cls(
            lambda patience: wire.greet(served.attach(), greeting, patience), timeout=timeout, where="here"
        )
        store._served = served
        store._release(store._take(timeout))
        return store

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        rank: int,
        size: int,
        timeout: float,
        token: bytes = b"",
        refused: float | None = None,
    ) -> Store:
        """The store of another rank; waits until rank 0 answers.

        Args:
            host: rank 0's host.
            port: on which it listens.
            rank: this rank.
            size: number of ranks.
            timeout: seconds that this waits, and each call unless told otherwise.
            token: as rank 0 has it.
            refused: seconds after which it is no use to wait for somebody to listen; None: as for all.

        Raises:
            WorldError: nobody answers in time, or rank 0 is of another job or counts otherwise.
        """
        greeting = wire.greeting(rank, size, token)
        deadline = time.monotonic() + timeout

        def open_link(patience: float) -> socket.socket:
            until = time.monotonic() + patience
            # Once they have met, rank 0 has ended where nobody listens.
            use = 0.0 if store._met else patience if refused is None else min(refused, patience)
            link = wire.dial(host, port, until, refused=use)
            return wire.greet(link, greeting, max(0.001, until - time.monotonic()))

        store = cls(open_link, timeout=timeout, where=f"{host}:{port}")
        store._release(store._take(max(0.001, deadline - time.monotonic())))
        return store

    def set(self, key: str, value: bytes) -> None:
        """Leave a value for all ranks; it replaces the one that is there.

        Raises:
            UsageError: a key of more than 1 KiB or a value of more than 1 GiB.
            WorldError: rank 0 is gone.
        """
        self._ask(wire.SET, key, value, seconds=self.timeout)

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """The value that a rank leaves, or has left.

        Args:
            key: its name.
            timeout: seconds that this waits for it; None: those of the store.

        Raises:
            WorldError: there is none in time, or rank 0 is gone.
        """
        return self._ask(wire.GET, key, seconds=self.timeout if timeout is None else timeout)

    def exchange(
        self,
        key: str,
        value: bytes,
        *,
        index: int,
        count: int,
        members: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[bytes]:
        """The values of all who take part, in their order; waits until all have come.

        All of them, and nobody else, call it with the same key, which can be used again afterwards.

        Args:
            key: which exchange.
            value: this rank's.
            index: this rank's place among those who take part.
            count: their number.
            members: their ranks; None: ranks 0 to ``count - 1``.
            timeout: seconds that this waits for the others; None: those of the store. When the first has
                waited for so long, all are told.

        Raises:
            WorldError: a rank does not come in time, or the ranks give different members; a
                :class:`RankGone` if one has ended, or rank 0.
        """
        ranks = range(count) if members is None else members
        seconds = self.timeout if timeout is None else timeout
        body = self._ask(wire.SWAP, key, value, seconds=seconds, index=index, members=ranks)
        values, place = [], 0
        with memoryview(body) as view:
            for _ in range(count):
                length = int.from_bytes(view[place : place + 8], "big")
                values.append(bytes(view[place + 8 : place + 8 + length]))
                place += 8 + length
        return values

    def abort(self, reason: str) -> None:
        """End what waits in this rank, in any thread, with a WorldError of this reason; later calls too."""
        with self._lock:
            self._ended = reason
            links = list(self._links)
        for link in links:
            wire.shut(link)

    def close(self) -> None:
        """Leave. On rank 0 this ends the store for all, after its last answers have left."""
        with self._lock:
            self._ended = self._ended or "It was closed."
            links, self._links, self._idle = self._links, set(), []
        for link in links:
            wire.shut(link)
            link.close()
        if self._served is not None:
            self._served.close()

    # --- one request ----------------------------------------------------------------------------

    def _ask(
        self,
        operation: int,
        key: str,
        value: bytes = b"",
        *,
        seconds: float,
        index: int = 0,
        members: Sequence[int] = (),
    ) -> bytes:
        name = key.encode()
        if len(name) > wire.MOST_KEY or len(value) > wire.MOST_VALUE:
            raise UsageError(
                f"The store takes keys up to {wire.MOST_KEY} bytes and values up to "
                f"{wire.MOST_VALUE >> 20} MiB, not {len(name)} and {len(value)} bytes.",
                fix="Send what is large as tensors, or in parts.",
            )
        head = wire.REQUEST.pack(operation, len(name), seconds, index, len(members), len(value))
        head += name + struct.pack(f"!{len(members)}I", *members)
        link = self._take(seconds)
        try:
            link.settimeout(seconds + GRACE)
            wire.send(link, head, value)
            status, length = wire.REPLY.unpack(wire.receive(link, wire.REPLY.size))
            body = wire.receive(link, length)
        except OSError as error:
            self._drop(link)
            raise self._lost(error) from error
        except BaseException:
            self._drop(link)
            raise
        self._release(link)
        if status != wire.OK:
            raise _problem(status, key, body.decode(), seconds)
        return body

    def _take(self, patience: float) -> socket.socket:
        with self._lock:
            if self._ended:
                raise self._lost(None)
            if self._idle:
                return self._idle.pop()
        try:
            link = self._open_link(patience)
        except OSError as error:
            raise self._lost(error) from error
        if not self._add(link):
            link.close()
            raise self._lost(None)
        return link

    def _add(self, link: socket.socket) -> bool:
        """Whether the store is still used, now that there is a connection."""
        with self._lock:
            self._met = True
            if not self._ended:
                self._links.add(link)
            return not self._ended

    def _release(self, link: socket.socket) -> None:
        with self._lock:
            self._idle.append(link)

    def _drop(self, link: socket.socket) -> None:
        with self._lock:
            self._links.discard(link)
        link.close()

    def _lost(self, error: OSError | None) -> WorldError:
        if self._ended:
            return WorldError(
                f"The ranks' store cannot be used any more. {self._ended}",
                fix="Look at the first error of the job: this one follows from it.",
            )
        if isinstance(error, ConnectionRefusedError):
            return RankGone(
                f"Nobody listens at {self._where}, where rank 0 keeps the ranks' store.",
                fix="Look at the log of rank 0: it has ended, or was not started.",
            )
        if isinstance(error, TimeoutError):
            return WorldError(
                f"Rank 0, which keeps the ranks' store at {self._where}, does not answer.",
                fix="Look at the log of rank 0; raise HORA_TIMEOUT if starting takes longer.",
            )
        return RankGone(
            f"Rank 0, which keeps the ranks' store at {self._where}, is gone: {error}.",
            fix="Look at the log of rank 0: the cause is there.",
        )


class Alone(Store):
    """The store of a job of one worker: nothing leaves the process.

    Args:
        timeout: seconds that :meth:`get` waits for another thread.
    """

    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        seconds = self.timeout if timeout is None else timeout
        with self._news:
            if not self._news.wait_for(lambda: key in self._values, seconds):
                raise _problem(wire.LATE, key, "", seconds)
            return self._values[key]

    def exchange(
        self,
        key: str,
        value: bytes,
        *,
        index: int,
        count: int,
        members: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[bytes]:
        if (index, count) != (0, 1):
            raise _problem(wire.WRONG, key, f"There is one worker, not {count}.", 0.0)
        return [value]

    def abort(self, reason: str) -> None:
        return

    def close(self) -> None:
        return


def _problem(status: int, key: str, text: str, seconds: float) -> WorldError:
    if status == wire.GONE:
        return RankGone(
            f"{text} ended before {key!r}, to which all must come.",
            fix="Look at the log of that rank: the cause is there.",
        )
    if status == wire.LATE and not text:
        return WorldError(
            f"No rank has left {key!r} in the ranks' store within {seconds:g} s.",
            fix="Look at the logs of the other ranks, or raise HORA_TIMEOUT if they need longer.",
        )
    if status == wire.LATE:
        ranks, _, waited = text.partition("|")
        return WorldError(
            f"{ranks} did not come to {key!r} within {waited} s.",
            fix="Look at the log of the first of them, or raise HORA_TIMEOUT if that takes longer.",
        )
    return WorldError(
        f"The ranks do not agree on {key!r}: {text}",
        fix="Make the same calls on every rank, in the same order.",
    )


def _forget(reference: weakref.ref[Store]) -> None:
    """In a forked child: close the copies, so that the end of the rank itself is seen."""
    store = reference()
    if store is None:
        return
    store._ended = "This is a forked child of a rank."
    for link in store._links:
        link.close()
    store._links, store._idle = set(), []
    store._lock = threading.Lock()  # another thread may have held it
    if store._served is not None:
        store._served.forget()
        store._served = None

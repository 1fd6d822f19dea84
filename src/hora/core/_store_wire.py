"""What goes over the connections of :mod:`hora.core.store`, and how they are opened."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

from hora.core.errors import WorldError

MAGIC = b"hora-store-1\n\0\0\0"

HELLO = struct.Struct("!16sII8s16s")
"""What a connection begins with: MAGIC, rank, size, a number of this client's own, the job's token."""

REQUEST = struct.Struct("!BIdIIQ")
"""Operation, bytes of the key, seconds, index, members, bytes of the value; then the key, the ranks of the
members (32 bits each) and the value."""

REPLY = struct.Struct("!BQ")
"""Status, bytes of the body: the value, a text, or for SWAP each value behind its length (64 bits)."""

SET, GET, SWAP = range(1, 4)
OK, LATE, GONE, WRONG = range(4)

MOST_KEY = 1 << 10
MOST_VALUE = 1 << 30
"""Bytes; a greater number is taken for something else than a request."""

CHUNK = 1 << 18

PAUSES = (0.002, 0.1)
"""Seconds between two tries to connect, growing: nobody tells that another process listens now."""


def nodelay(link: socket.socket) -> None:
    """Small messages leave at once."""
    if link.family in (socket.AF_INET, socket.AF_INET6):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def padded(token: bytes) -> bytes:
    return token[:16].ljust(16, b"\0")


def greeting(rank: int, size: int, token: bytes) -> bytes:
    return HELLO.pack(MAGIC, rank, size, os.urandom(8), padded(token))


def dial(host: str, port: int, deadline: float, *, refused: float) -> socket.socket:
    """Connect, as soon as somebody listens."""
    begin, pause = time.monotonic(), PAUSES[0]
    waits = threading.Event()  # a sleep that signals can end
    while True:
        left = deadline - time.monotonic()
        try:
            link = socket.create_connection((host, port), timeout=max(0.001, left))
        except (ConnectionError, socket.gaierror):
            if time.monotonic() - begin + pause >= min(refused, deadline - begin):
                raise
            waits.wait(pause)
            pause = min(pause * 2, PAUSES[1])
        else:
            nodelay(link)
            return link


def greet(link: socket.socket, greeting: bytes, patience: float) -> socket.socket:
    try:
        link.settimeout(patience)
        link.sendall(greeting)
        status, length = REPLY.unpack(receive(link, REPLY.size))
        text = receive(link, length).decode()
    except BaseException:
        link.close()
        raise
    if status != OK:
        link.close()
        raise WorldError(
            f"Rank 0 does not take this worker in: {text}",
            fix="Give each job a port of its own (MASTER_PORT), and each worker a rank of its own.",
        )
    return link


def send(link: socket.socket, head: bytes, value: bytes) -> None:
    if len(value) <= CHUNK:
        link.sendall(head + value)
    else:
        link.sendall(head)
        link.sendall(value)


def receive(link: socket.socket, count: int) -> bytes:
    whole, done = bytearray(count), 0
    with memoryview(whole) as view:
        while done < count:
            more = link.recv_into(view[done:])
            if not more:
                raise ConnectionResetError("the connection was closed")
            done += more
    return bytes(whole)


def shut(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or the other end is
        return

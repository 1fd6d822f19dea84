"""How a rank reaches the coordinator."""

from __future__ import annotations

import json
import socket

__all__ = ["connect"]


def connect(host: str, port: int, token: str, *, rank: int) -> tuple[socket.socket, socket.socket]:
    """The control and alarm connections of a rank other than 0."""
    ends = []
    for alarm in (False, True):
        connection = socket.create_connection((host, port), timeout=60.0)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{token} {json.dumps([rank, alarm])}\n".encode())
        ends.append(connection)
    return ends[0], ends[1]

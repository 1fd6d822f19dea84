"""What the server of :mod:`hora.core.store` keeps in mind: connections, and exchanges under way."""

from __future__ import annotations

import collections
import socket
from dataclasses import dataclass, field

__all__ = ["Peer", "Swap"]


@dataclass(eq=False)
class Peer:
    """One connection."""

    link: socket.socket
    origin: str
    deadline: float
    rank: int = -1  # not known yet
    client: bytes = b""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: collections.deque[memoryview] = field(default_factory=collections.deque)
    is_open: bool = True
    is_full: bool = False  # until it can be written to again
    leaves: bool = False  # when its outbox is empty


@dataclass(eq=False)
class Swap:
    """An exchange that is not complete."""

    members: tuple[int, ...]
    deadline: float
    seconds: float
    values: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, Peer] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """Ranks whose value is not there yet."""
        return [rank for index, rank in enumerate(self.members) if index not in self.values]

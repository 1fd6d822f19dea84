"""The engine's connections of this rank, and how to end what waits on them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hora.torch.engines import Group

__all__ = ["Connections", "shut"]

_EPOLL = "anon_inode:[eventpoll]"


class Connections:
    """Knows the sockets of the groups that were made inside :meth:`made`, and the groups in shared memory.

    PyTorch can abort an NCCL group but not a Gloo group: its ``abort`` does nothing there. A Gloo group
    listens to its sockets through an epoll descriptor of its own, and Linux tells which sockets that
    watches, so those can be shut down; Gloo then raises in whoever waits.
    """

    def __init__(self) -> None:
        self._loops: set[int] = set()
        self._before: set[int] | None = None
        self.groups: list[weakref.ref[Group]] = []

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """A group is made while the block runs."""
        self._before = before = _epolls()
        try:
            yield
        finally:
            self._before = None
            self._loops |= _epolls() - before

    def close(self) -> None:
        """End every collective that this rank waits in; later ones fail at once."""
        for reference in self.groups:
            group = reference()
            if group is not None:
                group.abort()
        before = self._before  # of a group that is being made
        for loop in self._loops | (set() if before is None else _epolls() - before):
            for fd in _watched(loop):
                shut(fd)
        if torch.cuda.is_available() and dist.is_initialized():
            backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
            backend.abort()


def _epolls() -> set[int]:
    found = set()
    with contextlib.suppress(FileNotFoundError):  # a system without /proc: nothing is known there
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
                if str(entry.readlink()) == _EPOLL:
                    found.add(int(entry.name))
    return found


def _watched(loop: int) -> list[int]:
    try:
        text = Path(f"/proc/self/fdinfo/{loop}").read_text()
    except FileNotFoundError:  # the group is gone
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, flags=re.MULTILINE)]


def shut(fd: int) -> None:
    """Shut a connection down. A listening socket is left alone: Gloo aborts the process when that fails."""
    with contextlib.suppress(OSError):  # closed by now, or never connected
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return
        with socket.socket(fileno=os.dup(fd)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)

"""Memory that the processes of one host share: anonymous files that no folder shows.

A segment has no name and lives as long as somebody maps it, so nothing is left behind, however the
processes end. It does not lie in ``/dev/shm``, whose size containers limit. The others of the host open it
through the descriptor of the process that made it, under ``/proc``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets

import torch

__all__ = ["Segment"]

NONCE = 16
"""Bytes at the start of a segment that tell whether it is the one that was meant."""


class Segment:
    """Shared memory, mapped here.

    Attributes:
        bytes: all of it, as a tensor.
        address: where it starts in this process.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        self.size = size
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> tuple[Segment, str]:
        """A new segment and the text by which others on this host can :meth:`open` it until :meth:`seal`."""
        fd = os.memfd_create("hora", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            segment = cls(fd, size)
        except BaseException:
            os.close(fd)
            raise
        segment._fd = fd
        nonce = secrets.token_bytes(NONCE)
        segment.memory[:NONCE] = nonce
        return segment, f"{os.getpid()} {fd} {size} {nonce.hex()}"

    _fd: int | None = None

    @classmethod
    def open(cls, text: str) -> Segment:
        """The segment that another process of this host made.

        Raises:
            OSError: it cannot be reached from here.
        """
        pid, number, size, nonce = text.split()
        path = f"/proc/{pid}/fd/{number}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < int(size):
                raise OSError(f"{path} is another file")
            segment = cls(fd, int(size))
        finally:
            os.close(fd)
        if bytes(segment.memory[:NONCE]) != bytes.fromhex(nonce):
            raise OSError(f"{path} is another file")
        return segment

    def seal(self) -> None:
        """Nobody else will open it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def prefer_huge_pages(self) -> None:
        """Fewer, larger pages, where the system has them to spare; a hint."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without them
                return

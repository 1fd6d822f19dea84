"""Hears of checkpoints the moment they are begun and committed."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Folders", "Saved"]

FOLDER, MARKER, PREFIX = "checkpoints", "commit.json", "step-"

IN_MOVED_TO, IN_CREATE = 0x80, 0x100
"""From <sys/inotify.h>."""

EVENT = struct.Struct("iIII")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was begun, or committed.

    Attributes:
        what: which of the two.
        folder: its name.
    """

    what: Literal["saving", "saved"]
    folder: str

    @property
    def step(self) -> int:
        """The step by which it is named; -1 where the name has none."""
        digits = self.folder.removeprefix(PREFIX).partition("-")[0]
        return int(digits) if digits.isdigit() else -1


class Folders:
    """Watches a run directory; ``fileno()`` is readable when something has come about.

    Args:
        run: the run directory, which exists.
    """

    def __init__(self, run: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watched: dict[int, Path] = {}
        self._known: set[Saved] = set()
        self._run = run
        self._watch(run)

    def fileno(self) -> int:
        """To be waited for."""
        fd: int = self._fd
        return fd

    def read(self) -> list[Saved]:
        """What is new, in its order."""
        found: list[Saved] = []
        for folder, name in self._events():
            found += self._look(folder, name)
        return found

    def close(self) -> None:
        """Watch no more."""
        os.close(self._fd)

    def _look(self, folder: Path, name: str) -> Iterator[Saved]:
        """An entry has come up; there may be others in it by now."""
        if folder == self._run and name == FOLDER:
            yield from self._enter(folder / name)
        elif folder.name == FOLDER and name.startswith(PREFIX):
            yield from self._once(Saved("saving", name))
            yield from self._enter(folder / name)
        elif folder.parent.name == FOLDER and name == MARKER:
            yield from self._once(Saved("saved", folder.name))

    def _enter(self, folder: Path) -> Iterator[Saved]:
        if not self._watch(folder):
            return
        for entry in sorted(folder.iterdir()):
            yield from self._look(folder, entry.name)

    def _once(self, saved: Saved) -> Iterator[Saved]:
        if saved not in self._known:
            self._known.add(saved)
            yield saved

    def _watch(self, folder: Path) -> bool:
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), IN_CREATE | IN_MOVED_TO)
        if number < 0:  # removed since
            return False
        self._watched[number] = folder
        return True

    def _events(self) -> Iterator[tuple[Path, str]]:
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            while data:
                number, _, _, length = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + length].rstrip(b"\0")
                data = data[EVENT.size + length :]
                if name and number in self._watched:
                    yield self._watched[number], os.fsdecode(name)

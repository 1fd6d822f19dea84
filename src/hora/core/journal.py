"""What the ranks of a job under ``hora chaos`` write down: one line per step that they made.

Each process appends to a file of its own, at once, so that a kill loses nothing that was made. The same line
goes to a socket, the *bell*, on which ``hora chaos`` hears how far the job is; nobody waits for that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BELL", "Entry", "Journal", "Span", "copy", "parse", "read", "ring"]

BELL = "bell"
"""Name of the socket in the folder of the journals."""

SUFFIX = ".steps"

Span = tuple[int, int, int]
"""Epoch, and the first and one-past-last position of samples in its order."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One step of one rank.

    Attributes:
        pid: of the process.
        worker: its lasting number in an elastic job, else its rank.
        world: names the meeting of ranks in which the step was made; another after each restart.
        rank: in that world.
        size: of that world.
        number: steps that the rank has made in that world, this one included.
        time: when it was made, ``time.time()`` in seconds.
        data: tells the training's data loader from others; None: it is not one of Hora's.
        spans: the samples of this rank in this step.
        before: checksum of some elements of the parameters before the step; None: not known.
        after: the same after it.
        total: sum of the magnitudes of these elements after the step.
    """

    pid: int
    worker: int
    world: str
    rank: int
    size: int
    number: int
    time: float
    data: str | None
    spans: tuple[Span, ...]
    before: int | None
    after: int | None
    total: float


class Journal:
    """The file of one process, and the bell.

    Args:
        folder: where ``hora chaos`` wants it.
    """

    def __init__(self, folder: Path) -> None:
        self._bell = folder / BELL
        path = folder / f"{os.getpid()}-{time.monotonic_ns()}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, entry: Entry) -> None:
        """Add a step."""
        line = json.dumps(dataclasses.asdict(entry), separators=(",", ":")).encode()
        os.write(self._file, line + b"\n")
        ring(self._bell, line)


def ring(bell: Path, line: bytes) -> None:
    """Send a line to whoever listens; lost where nobody does, or where he is far behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.setblocking(False)
        try:
            end.sendto(line, str(bell))
        except OSError:  # `hora chaos` has ended, or has not come to earlier ones: the file has it
            return


def parse(line: bytes) -> Entry:
    """The entry of a line.

    Raises:
        ValueError: it is none.
    """
    try:
        told = json.loads(line)
        told["spans"] = tuple((epoch, start, stop) for epoch, start, stop in told["spans"])
        return Entry(**told)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{line[:80]!r} is no line of a journal") from error


def read(folder: Path) -> list[Entry]:
    """All entries of the journals in a folder, in the order of time.

    Raises:
        ValueError: a line that is none, other than the last of a process that was killed.
    """
    found: list[Entry] = []
    for path in sorted(_files(folder)):
        *lines, _ = path.read_bytes().split(b"\n")
        found += map(parse, lines)
    return sorted(found, key=_by_time)


def _by_time(entry: Entry) -> tuple[float, int]:
    return entry.time, entry.number


def copy(folder: Path, to: Path) -> None:
    """Keep the journals of a folder in another one."""
    to.mkdir(exist_ok=True)
    for path in _files(folder):
        (to / path.name).write_bytes(path.read_bytes())


def _files(folder: Path) -> Iterable[Path]:
    return folder.glob(f"*{SUFFIX}")

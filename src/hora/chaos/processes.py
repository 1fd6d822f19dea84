"""The processes of a job: which of them are ranks, and what is left of it at the end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "Rank", "leftovers", "living", "segments", "tcp_ports"]

MARK = "HORA_CHAOS"
"""Variable that every process of a disturbed job has in its environment, and nothing else."""

PROC = Path("/proc")


@dataclass(frozen=True)
class Rank:
    """A rank that lives, held by a descriptor that can never be another process's.

    Attributes:
        pid: its process.
        worker: its lasting number in an elastic job, else its rank.
        descriptor: of the process.
        elastic: whether it belongs to an elastic job, in which its rank is another thing.
    """

    pid: int
    worker: int
    descriptor: int
    elastic: bool = False

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if it has ended."""
        try:
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def ended(self) -> bool:
        """Whether it lives no more."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Give up the descriptor."""
        os.close(self.descriptor)


def living(launcher: int, mark: str) -> list[Rank]:
    """The ranks that a launcher has started and that live, by their numbers; the caller closes each.

    Args:
        launcher: its process.
        mark: value of :data:`MARK` of this job.
    """
    found = []
    for pid in _children(launcher):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # ended since
            continue
        # What is read now belongs to the process of the descriptor, unless that one has ended meanwhile.
        environ = _environ(pid)
        number = environ.get("HORA_WORKER", environ.get("HORA_RANK", ""))
        rank = Rank(pid, int(number) if number.isdigit() else -1, descriptor, "HORA_WORKER" in environ)
        if rank.worker >= 0 and environ.get(MARK) == mark and not rank.ended:
            found.append(rank)
        else:
            rank.close()
    return sorted(found, key=lambda rank: rank.worker)


def leftovers(mark: str, run: Path) -> dict[int, str]:
    """Processes of a job that are still there: process id -> command.

    Args:
        mark: value of :data:`MARK` of the job.
        run: its run directory; its reaper is known by it.
    """
    found = {}
    for pid in _processes():
        command = _command(pid)
        reaper = len(command) > 1 and command[-1] == str(run) and any("_reaper" in word for word in command)
        if pid != os.getpid() and (_environ(pid).get(MARK) == mark or reaper):
            found[pid] = " ".join(command[:4])
    return found


def segments() -> frozenset[str]:
    """Shared memory that has a name, and System V's without a user: what can outlive all processes."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").glob("*")}
    table = PROC / "sysvipc" / "shm"
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        words = line.split()
        if words[6] == "0":  # nattch
            found.add(f"System V segment {words[1]} of pid {words[4]}")
    return frozenset(found)


def unused(segments_left: frozenset[str], pids: frozenset[int]) -> list[str]:
    """Those segments that belong to these processes, or, where no process is named, to none that lives."""
    used = set()
    for pid in _processes():
        try:
            maps = (PROC / str(pid) / "maps").read_text()
        except OSError:
            continue
        used |= {name for name in segments_left if name in maps}
    found = []
    for name in sorted(segments_left - used):
        numbers = {int(word) for word in re.findall(r"(?<![0-9a-z])\d{2,8}(?![0-9a-z])", name)}
        named = {pid for pid in numbers if pid in pids}
        if named or not numbers:
            found.append(name)
    return found


def tcp_ports(pid: int) -> set[int]:
    """Local ports of the TCP sockets that a process has."""
    folder = PROC / str(pid)
    sockets = set()
    lines: list[list[str]] = []
    with contextlib.suppress(OSError):  # it has ended
        for entry in list((folder / "fd").iterdir()):
            with contextlib.suppress(OSError):  # closed since
                match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                sockets |= {match[1]} if match else set()
        for table in ("tcp", "tcp6"):
            lines += [line.split() for line in (folder / "net" / table).read_text().splitlines()[1:]]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[9] in sockets}


def _processes() -> Iterator[int]:
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for child in _processes():
        try:
            # Behind the command, which may hold anything: state and parent.
            rest = (PROC / str(child) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) == pid:
            found.append(child)
    return found


def _environ(pid: int) -> dict[str, str]:
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # ended, or another user's
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _command(pid: int) -> list[str]:
    try:
        data = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")]

"""The processes of a job: noticing their end, killing them, finding what they left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hora.launch import _reaper
from hora.launch._away import AwayProcess

__all__ = ["Process", "Reaper", "end_descriptor", "kill_group", "sweep"]

LEAVING = 0.5
"""Seconds for what a rank started to notice the rank's end by itself, as loader workers do."""


def _has_pidfd() -> bool:
    """From Linux 5.3 on, unless a sandbox forbids it; not on macOS."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


_HAS_PIDFD = _has_pidfd()
HAS_PROC = Path("/proc/self/environ").exists()


class Reaper:
    """The tiny program that kills the job when this launcher is killed."""

    def __init__(self, job: str, groups: Sequence[int], run: Path) -> None:
        reader, self._writer = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _reaper.__file__, job, str(os.getpid()), str(run)],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                # Without the variables of an outer job: its own sweep must not take this one's reaper away.
                env={key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH")},
            )
        finally:
            os.close(reader)
        if not HAS_PROC:
            os.write(self._writer, "".join(f"{group}\n" for group in groups).encode())

    def close(self) -> None:
        """The job has ended; the reaper has nothing to do any more."""
        self.process.kill()
        self.process.wait()
        os.close(self._writer)


Process = subprocess.Popen[bytes] | AwayProcess
"""A worker's process, on this host or another."""


def end_descriptor(process: Process) -> int:
    """A descriptor that becomes readable when the process ends; the caller closes it."""
    if isinstance(process, AwayProcess):
        return process.end_descriptor()
    if _HAS_PIDFD:
        return os.pidfd_open(process.pid)
    reader, writer = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(writer)

    threading.Thread(target=wait, name="hora-wait", daemon=True).start()
    return reader


def kill_group(process: Process) -> None:
    """SIGKILL to a rank and to all in its process group, which it leads."""
    if isinstance(process, AwayProcess):
        process.kill_group()
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended
        return
    except PermissionError:  # macOS says so for a group of zombies
        return


def sweep(job: str, groups: Sequence[int]) -> list[str]:
    """Kill what the ranks left behind, after a moment to leave by itself.

    Returns:
        The names of what had to be killed, such as ``python (pid 1234)``.
    """
    if not HAS_PROC:
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:  # the group has ended, as it should
                continue
        return []
    left = _reaper.members(job)
    if not left:
        return []
    _reaper.wait_for(left, LEAVING)
    left = _reaper.members(job)
    names = {pid: _name(pid) for pid in left}
    killed = _reaper.sweep(job)
    return [names.get(pid, f"pid {pid}") for pid in killed]


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"pid {pid}"
    command = Path(os.fsdecode(words[0])).name if words and words[0] else "?"
    return f"{command} (pid {pid})"

"""The Python stacks of ranks that do not answer.

Each rank writes its stack into a pipe when a certain signal comes, from a handler in C that needs neither
the main thread nor the interpreter's lock (:mod:`faulthandler`), so it works in the midst of ``import
torch``, of a collective or of an endless loop.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hora.launch import _worker
from hora.launch._loop import Loop

__all__ = ["Stacks"]

QUIET = 0.2
"""Seconds after its last part in which a stack is taken for complete."""

LONGEST = 1 << 20
"""Bytes kept of a stack: what faulthandler writes of a hundred threads with a hundred frames each."""

END = re.compile(rb'_worker\.py", line \d+ in <module>\n+\Z')
"""The outermost frame of the main thread, which comes last."""


class Stacks:
    """Takes stacks.

    Args:
        answer: called with a rank and its stack, or with a sentence that says why there is none.
    """

    def __init__(self, loop: Loop, answer: Callable[[int, str], None]) -> None:
        self._loop = loop
        self._answer = answer
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._came: dict[int, bytearray] = {}  # of those that were asked
        self._quiet_at: dict[int, float] = {}
        self._quiet = loop.timer(self._when_quiet)

    def add(self, rank: int, process: subprocess.Popen[bytes], pipe: int, *, writer: int) -> None:
        """A rank that was started, the read end of its pipe, and the number that the other end has there."""
        os.set_blocking(pipe, False)
        self._processes[rank] = process
        self._pipes[rank] = pipe
        self._writers[rank] = writer
        self._loop.watch(pipe, lambda: self._read(rank))

    def ask(self, rank: int) -> None:
        """Have a stack taken; the answer comes at once or later."""
        if rank in self._came:
            return
        reason = self._hindrance(rank)
        if reason is not None:
            self._answer(rank, reason)
            return
        self._came[rank] = bytearray()
        signal = _worker.stack_signal()
        assert signal is not None
        os.kill(self._processes[rank].pid, signal)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped the rank (state T)."""
        process = self._processes.get(rank)
        status = None if process is None or process.returncode is not None else _status(process.pid)
        return status is not None and status.get("State", "?")[:1] == "T"

    def remove(self, rank: int) -> None:
        """The rank has ended."""
        pipe = self._pipes.pop(rank, None)
        if pipe is not None:
            self._loop.forget(pipe)
            os.close(pipe)
        if rank in self._came:
            self._finish(rank)

    def close(self) -> None:
        """Close what is still open."""
        self._came.clear()
        for rank in list(self._pipes):
            self.remove(rank)
        self._loop.drop(self._quiet)

    def _hindrance(self, rank: int) -> str | None:
        """Why a rank's stack cannot be taken; None when it can."""
        process, pipe = self._processes[rank], self._pipes.get(rank)
        if process.returncode is not None:
            return "it has ended"
        status = _status(process.pid)
        if status is None:
            return "its stack cannot be taken on this system"
        state = status.get("State", "?")[:1]
        if state == "Z":
            return "it has ended"
        if state in "Tt":
            stopped = "SIGSTOP" if state == "T" else "by a debugger"
            return f"it is stopped ({stopped}), so its stack cannot be taken"
        number = _worker.stack_signal()
        if number is None or not _has(status, "SigCgt", number):
            # Without its handler the signal would end the rank.
            if number is not None and _has(status, "SigIgn", number):
                return f"its script ignores signal {number}, so its stack cannot be taken"
            name = status.get("Name", "?")
            return f"it runs {name}, no Python program or only just started, so its stack cannot be taken"
        # A closed descriptor's number may stand for a file of the user's by now.
        if pipe is None or not _same_file(pipe, f"/proc/{process.pid}/fd/{self._writers[rank]}"):
            return "it has closed the descriptors that it got from Hora, so its stack cannot be taken"
        return None

    def _read(self, rank: int) -> None:
        try:
            data = os.read(self._pipes[rank], LONGEST)
        except BlockingIOError:
            return
        if not data:
            pipe = self._pipes.pop(rank)
            self._loop.forget(pipe)
            os.close(pipe)
            return
        came = self._came.get(rank)
        if came is None:
            return
        came += data[: LONGEST - len(came)]
        if END.search(came, max(0, len(came) - 4096)):
            self._finish(rank)
        else:
            self._quiet_at[rank] = time.monotonic() + QUIET
            self._quiet.by(self._quiet_at[rank])

    def _when_quiet(self) -> None:
        now = time.monotonic()
        for rank, at in list(self._quiet_at.items()):
            if now >= at:
                self._finish(rank)
            else:
                self._quiet.by(at)

    def _finish(self, rank: int) -> None:
        self._quiet_at.pop(rank, None)
        text = bytes(self._came.pop(rank)).decode("utf-8", "replace")
        self._answer(rank, text or "it has ended")


def _has(status: Mapping[str, str], mask: str, number: int) -> bool:
    """Whether a signal is in one of the masks of ``/proc/PID/status``."""
    return bool(int(status.get(mask, "0"), 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, str] | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _same_file(one: int, other: str) -> bool:
    """Whether a descriptor of ours and a path stand for the same pipe."""
    try:
        there = Path(other).stat()
    except OSError:  # closed
        return False
    here = os.fstat(one)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

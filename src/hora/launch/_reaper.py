"""Kills what is left of a job when its launcher is killed. Also the sweep that the launcher uses itself.

As a script (``python -I -S _reaper.py JOB PARENT RUN``) it must start in milliseconds and run in an
environment where nothing else of Hora can be imported, so it uses the standard library's smallest
modules alone. Its standard input is a pipe that only the launcher holds open; end of file on it, or the
launcher's own end, means that the launcher is gone. Every process of the job carries ``HORA_JOB=<id>``
in the environment it was started with, also a grandchild that called ``setsid`` or whose parent has
ended; that is how it is found. A process that wipes its own environment is not found.

When nothing is left it tells what happened, as nobody else can: in one line on the launcher's stderr,
and in ``run.json`` of the run directory RUN.

Where there is no ``/proc`` (macOS), the launcher writes the ranks' process group ids to the pipe, one a
line, and those groups are killed instead.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

SWEEP_SECONDS = 4.0
"""How long the sweep goes on; together with the start of the first kill it stays under 5 s."""

PAUSE_SECONDS = 0.05
"""At most so long between two looks at ``/proc``: something may fork faster than it is killed."""

PROC = "/proc"

NOWHERE = "-"
"""In place of the run directory: an agent on another host was killed, of which its supervisor tells."""

KILLED = "the launcher was killed, and all its workers were stopped"
"""What the run directory says of such a job."""


def members(job: str) -> list[int]:
    """Process ids of all living processes of the job, the caller's own left out."""
    mark = f"HORA_JOB={job}".encode()
    found = []
    for name in os.listdir(PROC):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"{PROC}/{name}/environ", "rb") as file:
                environ = file.read()
        except OSError:  # ended meanwhile, or belongs to another user
            continue
        # A zombie's environment reads as empty, so what is already dead is not found again.
        if mark in environ.split(b"\0"):
            found.append(int(name))
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # ended by itself in between
            continue


def sweep(job: str, seconds: float = SWEEP_SECONDS) -> list[int]:
    """Kill every process of the job, again and again until none is left; the ids that were killed."""
    killed: list[int] = []
    deadline = time.monotonic() + seconds
    while True:
        living = members(job)
        if not living or time.monotonic() > deadline:
            return killed
        kill(living)
        killed += [pid for pid in living if pid not in killed]
        wait_for(living, PAUSE_SECONDS)


def wait_for(pids: list[int], seconds: float) -> None:
    """Until all of them have ended, at most so long."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(seconds)
        return
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended
            continue
        try:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(descriptor, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(descriptor)


def main() -> None:
    job, parent, run = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups = _wait_for_end(parent)
    if os.path.isdir(f"{PROC}/self"):
        sweep(job)
    else:
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:  # the group has ended already
                continue
    if run != NOWHERE:
        tell(run)


def tell(run: str) -> None:
    """Say that the launcher was killed, unless it had written down the job's end before."""
    import json  # only now: the kill does not wait for it

    path = os.path.join(run, "run.json")
    try:
        with open(path, encoding="utf-8") as file:
            about = json.load(file)
        if not isinstance(about, dict) or "ended" in about:
            return
        about.update(ended=time.time(), exit_code=128 + signal.SIGKILL, failure=KILLED)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(about, file, indent=2)
        os.replace(path + ".new", path)
    except (OSError, ValueError) as error:  # the disk may be full; the terminal still hears of it
        print(f"hora: {path} does not tell of it: {error}", file=sys.stderr)
    print(f"hora: {KILLED}; logs: {os.path.join(run, 'logs')}", file=sys.stderr, flush=True)


def _wait_for_end(parent: int) -> list[int]:
    """Wait until the launcher is gone; the process group ids that it wrote."""
    waited: list[int] = [0]
    if hasattr(os, "pidfd_open"):
        # The pipe alone is not enough: a fork of the launcher (hora.run inside a larger program) holds
        # a copy of its other end.
        try:
            waited.append(os.pidfd_open(parent))
        except OSError:
            if os.getppid() != parent:
                return []
    text = b""
    while True:
        ready, _, _ = select.select(waited, [], [])
        if 0 in ready:
            data = os.read(0, 65536)
            text += data
            if data:
                continue
        return [int(line) for line in text.split()]


if __name__ == "__main__":
    main()

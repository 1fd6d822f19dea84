"""One execution of a job: its run directory, its ranks, and what is written down about them."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hora
from hora.core import trace
from hora.core.errors import HoraError, RunDirectoryError
from hora.core.plural import plural
from hora.core.rundir import RunDirectory, default_path, disk_errors
from hora.launch.failure import Failure
from hora.launch.job import FunctionTarget, Job, ModuleTarget, check
from hora.launch.supervisor import Supervisor

__all__ = ["JobResult", "run_job"]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: 0 when every rank ended with 0; else the first failing rank's code, 128 + N when it (or
            the whole job) was ended by signal N, 124 after a timeout.
        failure: the first failure, when a rank failed.
        run: the run directory.
        seconds: from the start of the first rank to the end of the last.
        interrupted_by: the signal that told the launcher to stop, when one did.
        message: one line about an end that is no rank's failure.
    """

    exit_code: int
    failure: Failure | None
    run: RunDirectory
    seconds: float
    interrupted_by: int | None = None
    message: str | None = None


def run_job(job: Job, *, announce: bool = True) -> JobResult:
    """Run a job to its end, with its output on this program's stdout and stderr.

    Args:
        job: what to run.
        announce: print the run directory at the start, and at the end why the job failed, on stderr.

    Raises:
        LaunchError: the job cannot be started. Nothing was written and nothing is running.
        SettingError: a ``HORA_*`` variable with a wrong name or value.
        RunDirectoryError: the run directory is occupied or unwritable, or (DiskFullError) there is no space.
    """
    check(job)
    path = job.run_dir if job.run_dir is not None else default_path(job.title)
    with disk_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        if job.run_dir is None:
            path = _claim(job.title)
        run = RunDirectory.create(path, about=_about(job))
    except HoraError:
        _remove_empty(([path] if job.run_dir is None else []) + missing)
        raise
    if announce and not job.quiet:
        _say(f"hora: {job.workers} {plural(job.workers, 'worker')}, run directory {path}")
    began = time.monotonic()
    supervisor = Supervisor(job, run, announce=announce)
    try:
        ended = supervisor.run()
    except HoraError:
        for folder in run.path.iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        _remove_empty(missing)
        raise
    seconds = time.monotonic() - began
    with _told():
        run.describe(
            ended=time.time(),
            seconds=round(seconds, 3),
            exit_code=ended.exit_code,
            failure=ended.failure.summary if ended.failure else ended.message,
        )
        trace.merge(run)
    if announce and ended.failure is not None:
        _say(ended.failure.report)
    elif announce and ended.message is not None:
        _say(ended.message)
    return JobResult(
        exit_code=ended.exit_code,
        failure=ended.failure,
        run=run,
        seconds=seconds,
        interrupted_by=ended.interrupted_by,
        message=ended.message,
    )


def _about(job: Job) -> dict[str, object]:
    if isinstance(job.target, FunctionTarget):
        command = [f"hora.run({job.target.stem})"]
    elif isinstance(job.target, ModuleTarget):
        command = ["-m", job.target.name, *job.arguments]
    else:
        command = [job.target.path, *job.arguments]
    return {
        "name": job.title,
        "command": command,
        "workers": job.workers,
        "host": socket.gethostname(),
        "start": time.time(),
        "python": platform.python_version(),
        "hora": hora.__version__,
        "timeout": job.timeout,
    }


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A run that has ended keeps its result when the last lines about it cannot be written."""
    try:
        yield
    except (RunDirectoryError, KeyError, ValueError) as error:
        _say(f"hora: the run directory is incomplete: {error}")


def _claim(title: str) -> Path:
    """A default run directory that no other launcher has: several may start in the same second."""
    while True:
        path = default_path(title)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:  # another one was faster; its directory counts as taken now
                continue
        return path


def _remove_empty(folders: Sequence[Path]) -> None:
    """Nothing half-done: what was made for a run that never started goes, unless another run uses it."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # not empty, or never made
            continue


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody is left to tell; the run directory has it too
        return

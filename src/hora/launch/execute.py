"""One execution of a job: its run directory, its ranks, and what is written down about them."""

from __future__ import annotations

import contextlib
import dataclasses
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
from hora.launch._attempts import Attempts
from hora.launch._ended import Ended
from hora.launch.failure import Failure
from hora.launch.job import FunctionTarget, Job, ModuleTarget, check

__all__ = ["JobResult", "run_job"]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: 0 when every rank ended with 0; else the first failing rank's code, 128 + N when it (or
            the whole job) was ended by signal N, 124 after a timeout, 75 when it was asked to stop and
            has saved its state.
        failure: the first failure, when a rank failed; with restarts that of the last attempt.
        run: the run directory, of the last attempt.
        seconds: from the start of the first rank to the end of the last.
        interrupted_by: the signal that told the launcher to stop, when one did.
        message: one line about an end that is no rank's failure.
        attempts: how often all ranks were started.
    """

    exit_code: int
    failure: Failure | None
    run: RunDirectory
    seconds: float
    interrupted_by: int | None = None
    message: str | None = None
    attempts: int = 1


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
    attempts = Attempts(job, run)
    try:
        ended = attempts.start(announce=announce)
    except HoraError:
        for folder in run.path.iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        _remove_empty(missing)
        raise
    while True:
        again, remark = attempts.repeat(ended)
        if not again:
            break
        with _told():
            run.describe(attempts=[dataclasses.asdict(attempt) for attempt in attempts.done])
        if announce:
            _tell(ended, remark)
        ended = attempts.start(announce=announce)
    seconds = time.monotonic() - began
    with _told():
        if job.restarts:
            run.describe(attempts=[dataclasses.asdict(attempt) for attempt in attempts.done])
        run.describe(
            ended=time.time(),
            seconds=round(seconds, 3),
            exit_code=ended.exit_code,
            failure=ended.failure.summary if ended.failure else ended.message,
        )
        trace.merge(run)
    if announce:
        _tell(ended, remark)
    return JobResult(
        exit_code=ended.exit_code,
        failure=ended.failure,
        run=attempts.run,
        seconds=seconds,
        interrupted_by=ended.interrupted_by,
        message=ended.message,
        attempts=len(attempts.done),
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
        "restarts": job.restarts,
        **({"hosts": dict(job.hosts)} if job.hosts else {}),
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


def _tell(ended: Ended, remark: str | None) -> None:
    """How the ranks ended, and what is done about it."""
    for text in (ended.failure.report if ended.failure else ended.message, remark):
        if text is not None:
            _say(text)


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody is left to tell; the run directory has it too
        return

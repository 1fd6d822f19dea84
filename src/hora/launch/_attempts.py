"""``--restarts``: all ranks are started again after a failure, as long as there is progress in between."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hora.core import commits
from hora.core.plural import plural
from hora.core.rundir import RunDirectory
from hora.launch._elastic import ElasticSupervisor
from hora.launch._ended import Ended
from hora.launch._spread import SpreadSupervisor
from hora.launch.job import Job
from hora.launch.supervisor import Supervisor

__all__ = ["Attempt", "Attempts"]

WITHOUT_PROGRESS = 2
"""How often a failure is repeated without a new checkpoint in between: a fault that comes again at once is
the program's, and not the machine's."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all ranks, as ``run.json`` tells it.

    Attributes:
        number: from 1.
        start: ``time.time()``.
        seconds: how long it lasted.
        exit_code: as of a job.
        failure: how it failed; None: it did not.
        saved: step of the newest checkpoint that it committed; None: none.
    """

    number: int
    start: float
    seconds: float
    exit_code: int
    failure: str | None
    saved: int | None


class Attempts:
    """Starts the ranks of one job, and again after a failure.

    Attributes:
        run: the run directory, of the attempt that is running or was the last.
        done: those that have ended.
    """

    def __init__(self, job: Job, run: RunDirectory) -> None:
        self.run = run
        self.done: list[Attempt] = []
        self._job = job
        self._began = time.monotonic()
        self._without_progress = 0
        self._newest: int | None = None

    def start(self, *, announce: bool) -> Ended:
        """Start all ranks, and wait for their end."""
        began = time.time()
        kind: type[Supervisor] = SpreadSupervisor if self._job.hosts else Supervisor
        if self._job.elastic is not None:
            kind = ElasticSupervisor
        ended = kind(self._job, self.run, announce=announce, began=self._began).run()
        self.done.append(
            Attempt(
                number=self.run.attempt,
                start=began,
                seconds=round(time.time() - began, 3),
                exit_code=ended.exit_code,
                failure=ended.failure.summary if ended.failure else None,
                saved=ended.saved,
            )
        )
        return ended

    def _on_disk(self) -> int | None:
        """The newest commit in the run directory: an elastic state's, which the ranks do not report."""
        for place in commits.places(self.run.path / "checkpoints"):
            try:
                return commits.read(place).step
            except commits.DamagedError:
                continue  # not whole: a rank was killed while it wrote
        return None

    def repeat(self, ended: Ended) -> tuple[bool, str | None]:
        """Whether to start the ranks again, and what to say about that.

        Raises:
            RunDirectoryError: the run directory takes nothing more.
        """
        if ended.failure is None or not self._job.restarts:
            return False, None
        # What an attempt commits is newer than what it was started from.
        newest = self._on_disk()
        progress = ended.saved is not None or (newest is not None and newest != self._newest)
        self._newest = newest
        self._without_progress = 0 if progress else self._without_progress + 1
        used = len(self.done) - 1
        if used >= self._job.restarts:
            return False, f"hora: no restart is left: all {used} were used (--restarts)"
        if self._without_progress > WITHOUT_PROGRESS:
            return False, (
                f"hora: not started again: it has failed {self._without_progress} times without a new "
                f"checkpoint in between; {self._job.restarts - used} of {self._job.restarts} "
                f"{plural(self._job.restarts, 'restart')} left"
            )
        self.run = self.run.again()
        saved = [attempt.saved for attempt in self.done if attempt.saved is not None]
        if saved:
            origin = f"from the checkpoint of step {saved[-1]}"
        elif newest is not None:
            origin = f"from commit {newest}"
        else:
            origin = "no checkpoint was saved yet"
        return True, f"hora: restart {used + 1} of {self._job.restarts}, {origin}"

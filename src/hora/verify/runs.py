"""Runs of the user's script that write a record."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.recording import Plan, RankRecord, Step, read_record
from hora.launch import Job, JobResult, Target, run_job

__all__ = ["Run", "Runner", "Runs"]

Runner = Callable[[Job], JobResult]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run and its record.

    Attributes:
        workers: number of ranks.
        plan: what they were told.
        ranks: what they wrote.
        result: how the job ended.
    """

    workers: int
    plan: Plan
    ranks: Sequence[RankRecord]
    result: JobResult

    @property
    def ok(self) -> bool:
        """Whether every rank came to a known end."""
        return self.result.exit_code == 0 and all(rank.ending is not None for rank in self.ranks)

    @functools.cached_property
    def steps(self) -> list[list[Step]]:
        """The steps that every rank made; one :class:`Step` per rank."""
        count = min(len(rank.steps) for rank in self.ranks)
        return [[rank.steps[index] for rank in self.ranks] for index in range(count)]

    def why(self) -> str:
        """Why it is of no use, in one line."""
        if self.result.failure is not None:
            return self.result.failure.summary
        return self.result.message or f"exit code {self.result.exit_code}"

    def samples(self, step: int) -> list[str]:
        """All samples of a step, sorted."""
        return sorted(
            sample for rank in self.steps[step] for batch in rank.batches for sample in batch.samples
        )

    def passes(self, step: int) -> int:
        """Backward passes of rank 0 in a step."""
        return len(self.steps[step][0].batches)


class Runs:
    """Starts the script again and again.

    Args:
        target: the script.
        arguments: its own arguments.
        folder: where the jobs' run directories and records go.
        steps: to record in each.
        env: variables for the workers.
        timeout: seconds for one run.
        runner: starts a job; tests have a faster one.
    """

    def __init__(
        self,
        target: Target,
        arguments: Sequence[str],
        *,
        folder: Path,
        steps: int,
        env: Mapping[str, str],
        timeout: float,
        runner: Runner | None = None,
    ) -> None:
        self._target, self._arguments = target, list(arguments)
        self._folder, self._steps, self._env, self._timeout = folder, steps, dict(env), timeout
        self._runner = runner or functools.partial(run_job, announce=False)
        self.made: list[Run] = []

    def run(self, workers: int, label: str, **plan: Any) -> Run:
        """Run with so many workers; ``plan`` holds fields of :class:`Plan`."""
        name = f"{len(self.made) + 1}-{label}"
        folder = self._folder / "records" / name
        folder.mkdir(parents=True)
        told = Plan(folder=folder, steps=self._steps, **plan)
        told.write(folder / "plan.json")
        started = {
            # Its messages would meet those of the script in other places than the script's own run has them.
            "HORA_GUARD": "off",
            "HORA_PROGRESS": "off",
            **self._env,
            "HORA_PRELOAD": "hora.adapter.recording.preload",
            "HORA_VERIFY": str(folder / "plan.json"),
        }
        began = time.monotonic()
        result = self._runner(
            Job(
                target=self._target,
                arguments=self._arguments,
                workers=workers,
                env=started,
                run_dir=self._folder / "jobs" / name,
                quiet=True,
                timeout=self._timeout,
            )
        )
        if result.interrupted_by is not None:
            raise KeyboardInterrupt
        result = dataclasses.replace(result, seconds=time.monotonic() - began)
        ranks = [read_record(told.lines(rank)) for rank in range(workers)]
        made = Run(workers=workers, plan=told, ranks=ranks, result=result)
        self.made.append(made)
        return made

    def forget_batches(self) -> None:
        """Remove what only further experiments would need."""
        for run in self.made:
            for rank in range(run.workers):
                run.plan.batches(rank).unlink(missing_ok=True)
        for path in (self._folder / "records").glob("initial-*"):
            path.unlink()

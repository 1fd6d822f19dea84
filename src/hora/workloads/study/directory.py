"""The directory of a study: its plan, the results of the cells that are done, and the runs that made them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hora.core.errors import RunDirectoryError
from hora.core.rundir import disk_errors, replace_text
from hora.workloads.study.plan import Cell, Plan

__all__ = ["Result", "StudyDirectory"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a cell.

    Attributes:
        accuracy: top-1 on the test images after the last epoch, 0 to 1.
        losses: mean training loss of each epoch.
        steps: optimizer steps.
        lr: peak learning rate.
        noise_scale: the last of the gradient noise scale, in samples; None: one micro-batch per step.
        finite: whether the training went on to its end; else its loss was no number any more.
        seconds: that it took.
    """

    cell: Cell
    accuracy: float
    losses: tuple[float, ...]
    steps: int
    lr: float
    noise_scale: float | None
    finite: bool
    seconds: float


class StudyDirectory:
    """One study's directory.

    Attributes:
        page: the report.
        plot: the plot of the report, by itself.
        table: the table of the report, as Markdown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.page = self.path / "study.html"
        self.plot = self.path / "study.svg"
        self.table = self.path / "study.md"
        self._plan = self.path / "study.json"
        self._cells = self.path / "cells.jsonl"

    @property
    def exists(self) -> bool:
        """Whether there is a study."""
        return self._plan.is_file()

    def write_plan(self, plan: Plan) -> None:
        """Begin a study, or change the grid of one.

        Raises:
            RunDirectoryError: something else is there, or it cannot be written.
        """
        if self.path.exists() and not self.exists and any(self.path.iterdir()):
            raise RunDirectoryError(
                f"{self.path} is occupied, and not by a study.",
                fix="Give another --run-dir, or leave it out.",
            )
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self._plan, json.dumps(plan.as_json(), indent=1) + "\n")

    def plan(self) -> Plan:
        """The study's plan.

        Raises:
            RunDirectoryError: there is none, or it cannot be read.
        """
        try:
            return Plan.from_json(json.loads(self._plan.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.path} holds no study that can be read: {error}.",
                fix="Give the directory that hora study printed at its start.",
            ) from error

    def results(self) -> list[Result]:
        """Of the cells that are done; a line that was cut off counts for nothing."""
        if not self._cells.is_file():
            return []
        found = {}
        for line in self._cells.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                values = json.loads(line)
                cell = Cell(**values.pop("cell"))
                found[cell] = Result(cell=cell, **values | {"losses": tuple(values["losses"])})
        return list(found.values())

    def add(self, result: Result) -> None:
        """Keep a result for good."""
        text = json.dumps(asdict(result)) + "\n"
        with disk_errors(self.path), self._cells.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # of a line that was cut off
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def next_run(self) -> Path:
        """Where the next run over the cells that are left is to be."""
        number = 1
        while (self.path / "runs" / str(number)).exists():
            number += 1
        return self.path / "runs" / str(number)

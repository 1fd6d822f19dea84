"""Stopping at a step edge: which ranks can do so, which have, and what was saved last."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

from hora.core.rundir import RunDirectory
from hora.launch._report import shown, signal_name

__all__ = ["ASKING", "Edges"]

ASKING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that mean "save at the next step edge, then stop": what schedulers send before they take a
machine away. Ctrl-C and a terminal that is closed mean "stop now"."""


class Edges:
    """What the ranks have told about their step edges (see :mod:`hora.core.notices`).

    Attributes:
        saved: step of the newest checkpoint that was committed; None: none was.
        stopped: the step at which each rank has stopped because it was asked to.
    """

    def __init__(self) -> None:
        self.saved: int | None = None
        self.stopped: dict[int, int] = {}
        self._able: set[int] = set()

    def notice(self, record: Mapping[str, Any]) -> None:
        """Take in what a rank tells."""
        rank, step = record.get("rank"), record.get("step")
        if not isinstance(rank, int):
            return
        if record["notice"] == "edge":
            self._able.add(rank)
        elif record["notice"] == "stopped":
            self.stopped[rank] = step if isinstance(step, int) else 0
        elif record["notice"] == "saved" and isinstance(step, int):
            self.saved = step if self.saved is None else max(self.saved, step)

    def able(self, ranks: Iterable[int]) -> bool:
        """Whether each of these ranks, and there are some, stops at a step edge when it is asked to."""
        wanted = set(ranks)
        return bool(wanted) and wanted <= self._able

    def farewell(self, run: RunDirectory, *, asked_by: int | None, elastic: bool = False) -> str:
        """What is said about a job that has stopped at a step edge.

        Args:
            run: its run directory.
            asked_by: the signal to the launcher; None: the ranks alone got one.
            elastic: whether its state was in memory, which ends with the ranks.
        """
        step = max(self.stopped.values(), default=0)
        why = "because its ranks were asked to" if asked_by is None else f"by {signal_name(asked_by)}"
        if self.saved is None and elastic:
            return (
                f"hora: stopped {why}, without a checkpoint: what was committed was in memory, and is lost.\n"
                "  To keep it, write checkpoints = hora.Checkpoints(...) and checkpoints.step()."
            )
        if self.saved is None:
            return f"hora: stopped {why} after step {step}, without a checkpoint"
        return (
            f"hora: stopped {why} after step {step}; the checkpoint of step {self.saved} is saved.\n"
            f"  Go on with: hora run --resume {shown(run.path)} ..."
        )

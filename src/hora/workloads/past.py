"""What a training that goes on from a checkpoint has to know, beside model, optimizer and loader."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import hora.torch as hora
from hora.torch import Checkpoints

__all__ = ["Past", "checkpoints"]


class Past:
    """Kept in checkpoints.

    Attributes:
        values: of the last evaluation.
        evaluating: seconds spent in evaluations.
        reached_at: seconds after which the target was known to be reached; None: it was not yet.

    Args:
        started: when training data was first touched, ``time.perf_counter()``.
    """

    def __init__(self, started: float) -> None:
        self.values: dict[str, float] = {}
        self.evaluating = 0.0
        self.reached_at: float | None = None
        self._started = started

    @property
    def seconds(self) -> float:
        """Seconds that the training has taken, those before an interruption included."""
        return time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {
            "values": self.values,
            "evaluating": self.evaluating,
            "reached_at": self.reached_at,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; what is lost between the checkpoint and its restoring does not count as training."""
        self.values, self.evaluating = dict(state["values"]), state["evaluating"]
        self.reached_at = state["reached_at"]
        self._started = time.perf_counter() - state["seconds"]


def checkpoints(state: Mapping[str, Any], *, every: int | None) -> Checkpoints | None:
    """The checkpoints of a training, which goes on from the newest; None where nothing is written.

    Args:
        state: what they hold, by name.
        every: steps between two; None: only when the job is asked to stop.
    """
    here = hora.context()
    if here.run is None and here.settings.checkpoints is None:
        return None
    made = Checkpoints(dict(state), every=every)
    made.restore()
    return made

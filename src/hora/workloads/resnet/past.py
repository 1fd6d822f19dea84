"""What a training that goes on from a checkpoint has to know, beside model, optimizer and loader."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import hora.torch as hora
from hora.torch import Checkpoints, Loader
from hora.workloads.resnet.learner import Learner

__all__ = ["Past", "checkpoints"]


class Past:
    """Kept in checkpoints.

    Attributes:
        accuracy: of the last evaluation, 0 to 1.
        evaluating: seconds spent in evaluations.
        reached_at: seconds after which the target was known to be reached; None: it was not yet.

    Args:
        started: when training data was first touched, ``time.perf_counter()``.
    """

    def __init__(self, started: float) -> None:
        self.accuracy = 0.0
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
            "accuracy": self.accuracy,
            "evaluating": self.evaluating,
            "reached_at": self.reached_at,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; what is lost between the checkpoint and its restoring does not count as training."""
        self.accuracy, self.evaluating = state["accuracy"], state["evaluating"]
        self.reached_at = state["reached_at"]
        self._started = time.perf_counter() - state["seconds"]


def checkpoints(learner: Learner, loader: Loader, past: Past) -> Checkpoints | None:
    """The checkpoints of a training, which goes on from the newest; None where nothing is written."""
    here = hora.context()
    if here.run is None and here.settings.checkpoints is None:
        return None
    state = {"model": learner.model, "optimizer": learner.optimizer, "loader": loader, "past": past}
    made = Checkpoints(state, every=learner.profile.checkpoint_every)
    made.restore()
    return made

"""Logs of an epoch that are those of all ranks."""

from __future__ import annotations

from typing import Any

import keras

from hora.keras._backend import api
from hora.keras._metrics import average, results

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Make the metrics at the end of an epoch those over the samples of all ranks, the same on each of them.

    What the model's metrics keep (sums and counts) is added up over the ranks, so that uneven shares count by
    their samples, and AUC, precision or recall are those of all samples, which a mean of the ranks' results
    is not. Other values in the logs become the ranks' mean. ``fit``'s history has the global values, and so
    have the callbacks after this one; the progress bar shows this rank's during the epoch, and the global
    ones at its end. Put it before ``EarlyStopping``, ``ReduceLROnPlateau`` and checkpoints: otherwise the
    ranks decide differently.

    Args:
        device: as in Horovod; no effect.
        process_set: the ranks whose metrics count together; others keep their own.
    """

    def __init__(self, device: str = "", process_set: Any = api.global_process_set) -> None:
        super().__init__()
        self._process_set = process_set
        self._training = False
        self._found: dict[str, float] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A new epoch has no results yet."""
        self._training, self._found = True, {}

    def on_test_begin(self, logs: Any = None) -> None:
        """``fit`` validates: the states of the training's metrics are there for the last time."""
        if self._training and self._counts_several():
            self._found |= results(self.model, self._process_set)

    def on_test_end(self, logs: Any = None) -> None:
        """The states of the validation's metrics are there."""
        if not self._counts_several():
            return
        found = results(self.model, self._process_set)
        if self._training:
            self._found |= {f"val_{name}": value for name, value in found.items()}
        elif logs is not None:
            logs.update((name, found[name]) for name in found if name in logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The logs become those of all ranks."""
        self._training = False
        if logs is None or not self._counts_several():
            return
        if not any(name.startswith("val_") for name in self._found):
            self._found |= results(self.model, self._process_set)
        others = {
            name: value
            for name, value in logs.items()
            if name not in self._found and isinstance(value, int | float)
        }
        logs.update((name, value) for name, value in self._found.items() if name in logs)
        logs.update(average(others, self._process_set))

    def _counts_several(self) -> bool:
        return bool(api.size() > 1 and self._process_set.included())

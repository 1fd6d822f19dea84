"""Callbacks that keep and commit the state of a training."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Commit a state every so many batches, and at the end of each epoch.

    Put it after those that change the state.

    Args:
        state: an elastic state, as ``hora.elastic.KerasState``.
        batches_per_commit: 0: only at the end of each epoch.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Batches are counted anew."""
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self._since += 1
        if self.batches_per_commit and self._since >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        self._since = 0
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """``state.batch`` is how many batches of the epoch are done; 0 when it has ended.

    Args:
        state: an elastic state with a value ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One more."""
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its beginning."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """``state.epoch`` is how many epochs are done: give ``fit`` ``initial_epoch=state.epoch``.

    Args:
        state: an elastic state with a value ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One more."""
        self.state.epoch = epoch + 1

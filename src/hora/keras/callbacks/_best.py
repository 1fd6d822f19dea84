"""The best model, written once."""

from __future__ import annotations

from typing import Any

import keras

from hora.keras._backend import api

__all__ = ["BestModelCheckpoint"]


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc] # Keras has no types
    """Keep the model of the best epoch so far in a file, which rank 0 writes.

    Put it after ``MetricAverageCallback``, so that the best epoch is that of all ranks.

    Args:
        monitor: the metric that says which is best.
        verbose: 1 tells when it writes.
        mode: ``"min"``, ``"max"``, or ``"auto"``: by the metric's name.
        save_freq: ``"epoch"``, or every so many batches.
        filepath: where to: a ``.keras`` file. It may be set later: ``callback.filepath = ...``.
        options: other arguments of ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: Any = "best.keras",
        **options: Any,
    ) -> None:
        options.setdefault("save_best_only", True)
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, **options
        )

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if api.rank() == 0:
            super()._save_model(epoch, batch, logs)

"""Learning rates that follow the epochs: a warm-up from one worker's rate, and any schedule.

A warm-up to a rate that grows with the number of workers, and the correction of momentum when the rate
changes, are those of Goyal et al. (2017), arXiv:1706.02677, sections 2.1 and 2.2.
"""

# ruff: noqa: PLR0917 - scripts written for Horovod pass these arguments by position
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from hora.core.errors import UsageError
from hora.keras._backend import api

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Between two epochs, the learning rate is ``initial_lr * multiplier(epoch)``.

    Several together make a whole schedule: each acts in its own epochs. The optimizer has to be made with a
    number as its learning rate.

    Args:
        initial_lr: what the multiplier multiplies.
        multiplier: a number, or a function of the epoch, counted from 0.
        start_epoch: first epoch in which it acts.
        end_epoch: first epoch in which it acts no more; None: to the end.
        staircase: True sets the rate at the beginning of each epoch; False before each batch, with a fraction
            of an epoch: the third of 10 batches of epoch 4 is 4.2.
        momentum_correction: when the rate changes, scale what momentum keeps (SGD's and RMSprop's, which hold
            the old rate) by new over old rate.
        steps_per_epoch: batches per epoch; None: as many as ``fit`` says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        constant = None if callable(multiplier) else float(multiplier)
        self.staircase = staircase or constant is not None
        self.multiplier: Any = multiplier if constant is None else lambda epoch: constant
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """How many batches an epoch has is known now."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__} cannot tell how many batches an epoch has.",
                    fix="Write steps_per_epoch=... in it, or in fit.",
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Which epoch it is."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, if this is the moment."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase and self.steps_per_epoch:
            self._set(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The logs get the learning rate, as ``lr``."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer  # Keras takes the state out of JAX's compiled loop here
        old, new = _rate(optimizer), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            for variable in _momenta(optimizer):
                variable.assign(variable.value * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from ``initial_lr / size`` to ``initial_lr`` in the first epochs, batch by
    batch.

    After batch ``b`` (from 1) of ``s`` per epoch in epoch ``e``, it has reached
    ``initial_lr / size * (1 + (size - 1) * (e + b / s) / warmup_epochs)``.

    Args:
        initial_lr: the rate in the end: that of one worker times the number of workers.
        warmup_epochs: in how many epochs.
        momentum_correction: see :class:`LearningRateScheduleCallback`.
        steps_per_epoch: batches per epoch; None: as many as ``fit`` says.
        verbose: 1: rank 0 tells when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            done = (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs
            share: float = (1 + (api.size() - 1) * min(done, 1.0)) / api.size()
            return share

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The logs get the learning rate; the end of the warm-up is told."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and api.rank() == 0:
            rate = _rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the warm-up of the learning rate is over, at {rate:g}.")


def _rate(optimizer: Any) -> float:
    rate: float = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    return rate


def _momenta(optimizer: Any) -> list[Any]:
    """Variables in which past gradients are kept times the rate of their time."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, keras.optimizers.SGD):
        found = getattr(inner, "momentums", [])
    elif isinstance(inner, keras.optimizers.RMSprop) and inner.momentum > 0:
        found = getattr(inner, "_momentums", [])
    else:
        found = []
    return [variable for variable in found if variable is not None]

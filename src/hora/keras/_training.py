"""What the guard sees of a training with Keras: fingerprints of a ``fit``'s variables, and the gradients.

On JAX ``hora.jax.spmd`` gives them. On TensorFlow and PyTorch the variables are looked at between the batches
of ``fit``, and the gradients when they are averaged, in loops of the user's own too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras

from hora.adapter import records
from hora.adapter.prints import MOST, combined, digest, is_due
from hora.adapter.training import Training
from hora.adapter.watch import unharmed
from hora.keras._backend import BACKEND, api
from hora.keras._optimizer import Distributed

__all__ = ["Fit"]


class Fit:
    """One ``fit``."""

    def __init__(self, model: Any) -> None:
        context = api.context()
        optimizer = model.optimizer
        options = optimizer._options
        local = options.is_local()
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = {id(each) for each in getattr(inner, "_accumulated_gradients", None) or ()}
        self.reporter = context.guard.reporter
        self._watch = context.watch
        self._model = model
        self._batches = 0
        self._parameters = [each for each in model.trainable_variables if id(each) not in local][:MOST]
        self._state = [] if local else [each for each in optimizer.variables if id(each) not in own][:MOST]
        self._buffers = [] if local else _buffers(model)
        self._training = (
            None
            if BACKEND == "jax"
            else Training(
                self._watch,
                "fit",
                members=options.process_set.ranks or range(api.size()),
                names=[each.path for each in self._parameters],
                optimizer=type(optimizer).__name__,
                shapes=[(each.dtype, each.shape) for each in self._parameters],
            )
        )

    @classmethod
    def of(cls, model: Any) -> Fit | None:
        """Of a model, if there is a guard and the ranks train it together."""
        optimizer = getattr(model, "optimizer", None)
        if not api.is_initialized() or not isinstance(optimizer, Distributed):
            return None
        if api.size() == 1 or api.context().watch is None:
            return None
        options: Any = optimizer._options
        built = model.built and getattr(optimizer, "built", False)
        return cls(model) if built and options.process_set.included() else None

    @property
    def broken(self) -> bool:
        """Whether a fault has ended the watch."""
        return bool(self._watch.broken)

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""
        self._watch.give_up(error)

    @unharmed
    def begin(self) -> None:
        """The training begins with these variables."""
        self._watch.states = _noise(self._model)
        if self._training is None:
            return
        self._watch.outer = self._training
        self._training.begin(_digests(self._parameters), state=_digests(self._state), rates=self._rates())

    @unharmed
    def stepped(self, batches: int) -> None:
        """So many batches more are done."""
        before, self._batches = self._batches, self._batches + batches
        if self._training is not None and any(map(is_due, range(before + 1, self._batches + 1))):
            self._training.print(
                _digests(self._parameters),
                step=self._batches,
                state=_digests(self._state),
                rates=self._rates(),
            )

    @unharmed
    def end(self) -> None:
        """The training is over."""
        self._watch.outer = self._watch.states = None
        if self._training is not None and self._batches and len(self._training.members) > 1:
            names = _alike([each.path for each in self._buffers])
            self.reporter.send(
                records.final(
                    key=self._training.key,
                    step=self._batches,
                    parameters=_digests(self._parameters),
                    buffers=dict(zip(names, _digests(self._buffers), strict=True)),
                )
            )

    def _rates(self) -> list[dict[str, float]]:
        return [{"lr": float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))}]


def _buffers(model: Any) -> list[Any]:
    """Variables that change without gradients, such as the statistics of batch normalization."""
    metrics = {id(each) for each in model.metrics_variables}
    return [
        each
        for each in model.non_trainable_variables
        if id(each) not in metrics and "seed_generator_state" not in each.path
    ][:MOST]


def _alike(paths: Sequence[str]) -> list[str]:
    """Names that are the same on all ranks: Keras counts the layers that a process has made."""
    plain = [re.sub(r"_\d+(?=/|$)", "", path) for path in paths]
    counts = [plain[: place + 1].count(name) for place, name in enumerate(plain)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(plain, counts, strict=True)]


def _noise(model: Any) -> str | None:
    """A word for the states of the generators of layers that draw noise in training; None: none does."""
    states = [
        _digest(generator.state)
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.Model)
        for generator in getattr(layer, "_seed_generators", ())
    ]
    return combined(states) if states else None


def _digests(variables: Sequence[Any]) -> list[int]:
    return [_digest(each) for each in variables]


def _digest(variable: Any) -> int:
    return digest(keras.ops.convert_to_numpy(variable.value))

"""Follows the train steps of ``fit`` and ``train_on_batch``, and models that a loop of the user's calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_loss
from numpy.typing import NDArray

from hora.adapter.recording.recorder import Recorder
from hora.keras._backend import BACKEND, engine

__all__ = ["Fit", "around", "numbers"]


def around(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a function by what ``change`` makes of it, where it was defined."""
    if isinstance(owner, type):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    setattr(owner, name, change(getattr(owner, name)))


def numbers(value: Any) -> NDArray[Any]:
    """A tensor or variable as an array of its own."""
    return np.array(ops.convert_to_numpy(value))


class Fit:
    """The train steps of one rank.

    Attributes:
        counts: what each mean in the present pass's loss was divided by.
        models: those that were called, outermost.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.counts: list[float] = []
        self.models: list[Any] = []
        self._depth = 0
        self._closing: Callable[[Sequence[Any] | None], None] | None = None

    def start(self) -> None:
        """Look on from here on."""
        around(keras.Model, "compile", self._compile)
        around(keras.Model, "make_train_function", self._make_train_function)
        around(keras.layers.Layer, "__call__", self._call)
        around(keras_loss, "reduce_weighted_values", self._mean)

    def at_end(self, close: Callable[[Sequence[Any] | None], None]) -> None:
        """Call this with the model's other variables: now, or when the train step has computed them."""
        if self._recorder.in_step:
            self._closing = close
        else:
            close(None)

    def buffers(self, values: Sequence[Any] | None) -> dict[str, NDArray[Any]]:
        """What the models keep beside their parameters."""
        found = {}
        for model in self.models:
            own = model.non_trainable_variables
            now = values if values is not None and len(values) == len(own) else [each.value for each in own]
            for variable, value in zip(own, now, strict=True):
                if "float" in str(variable.dtype):
                    found[variable.path] = numbers(value)
        return found

    def _compile(self, original: Any) -> Any:
        def compile_(model: Any, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original).bind(model, *args, **kwargs)
            given.arguments |= {"run_eagerly": True, "jit_compile": False}
            original(*given.args, **given.kwargs)

        return compile_

    def _make_train_function(self, original: Any) -> Any:
        def make_train_function(model: Any, force: bool = False) -> Any:
            if "train_step" not in vars(model):
                object.__setattr__(model, "train_step", self._train_step(model, model.train_step))
            return original(model, force)

        return make_train_function

    def _train_step(self, model: Any, original: Any) -> Any:
        def train_step(*args: Any) -> Any:
            recorder = self._recorder
            if not recorder.active:
                return original(*args)
            *state, data = args
            recorder.begin_pass()
            state = self._begun(model, state)
            data = recorder.sources.handed("fit", data, native=_like, alone=True)
            recorder.in_step = True
            try:
                result = original(*state, data)
            finally:
                recorder.in_step = False
            if self._closing is not None:
                close, self._closing = self._closing, None
                close(result[1][1] if state else None)
            return result

        return train_step

    def _call(self, original: Any) -> Any:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            is_model = self._depth == 0 and isinstance(layer, keras.Model) and self._recorder.active
            if is_model and not self._recorder.in_step and not self._known(layer) and _eager():
                self._begun(layer, [])
            self._depth += 1
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _known(self, model: Any) -> bool:
        return any(model is each for each in self.models)

    def _begun(self, model: Any, state: Sequence[Any]) -> list[Any]:
        """The model is used for the first time: give it the first parameters of another run, if asked to.

        Args:
            model: the model.
            state: on JAX what the train step gets in the place of the variables; else nothing.
        """
        if self._known(model):
            return list(state)
        self.models.append(model)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        if not variables or "initial-parameters" not in self._recorder.apply:
            return list(state)
        if state:
            trainable, others, *rest = state[0]
            first = self._recorder.first_parameters([numbers(each) for each in (*trainable, *others)])
            if first is None:
                return list(state)
            new = [ops.convert_to_tensor(each) for each in first]
            return [(new[: len(trainable)], new[len(trainable) :], *rest)]
        first = self._recorder.first_parameters(
            [numbers(each) for each in variables], number=len(self.models) - 1
        )
        for variable, value in zip(variables, first or (), strict=False):
            variable.assign(value)
        return list(state)

    def _mean(self, original: Any) -> Any:
        def reduce_weighted_values(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            if reduction not in (None, "none", "sum") and self._recorder.in_step:
                counted = sample_weight if reduction == "mean_with_sample_weight" else mask
                self.counts.append(float(np.prod(np.shape(values))) if counted is None else _sum(counted))
            return original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

        return reduce_weighted_values


def _eager() -> bool:
    """Whether a model that is called now computes, rather than being built."""
    return BACKEND == "torch" or (BACKEND == "tensorflow" and sys.modules["tensorflow"].executing_eagerly())


def _sum(values: Any) -> float:
    return float(numbers(values).astype(np.float64).sum())


def _like(array: NDArray[Any], leaf: Any) -> Any:
    kind = str(leaf.dtype).removeprefix("torch.")
    array = array.astype(kind) if array.dtype.kind == "f" else array
    return array if isinstance(leaf, np.ndarray) and BACKEND == "jax" else engine.native(array)

"""What ``init()`` changes in Keras, and ``shutdown()`` takes back.

- Before a model trains, its train step is made fit for the ranks' engine, see :func:`_prepared`.
- A TensorFlow model without an input shape is built before the first step, as on the other backends: what
  rank 0 broadcasts has to be there before anything is computed with it.
- The guard gets fingerprints of the variables.
- Only rank 0 shows progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import ProgbarLogger
from keras.optimizers import LossScaleOptimizer

from hora.keras import _data
from hora.keras._backend import BACKEND, api, engine
from hora.keras._optimizer import Distributed, unwrap, wrap
from hora.keras._training import Fit

__all__ = ["install", "remove"]

_changed: list[tuple[type, str, Any]] = []


def install() -> None:
    """Change Keras; a second call does nothing."""
    if _changed:
        return
    _around(keras.Model, "make_train_function", _prepared)
    _around(keras.Model, "_symbolic_build", _peeking)
    if BACKEND == "tensorflow":
        _around(keras.Model, "_maybe_symbolic_build", _building)
    _around(keras.callbacks.CallbackList, "on_train_begin", _beginning)
    _around(keras.callbacks.CallbackList, "on_train_batch_end", _stepping)
    _around(keras.callbacks.CallbackList, "on_train_end", _ending)
    if api.rank() > 0:
        _around(ProgbarLogger, "set_params", _silent)


def remove() -> None:
    """Make Keras as it was."""
    while _changed:
        owner, name, original = _changed.pop()
        setattr(owner, name, original)


def _around(cls: type, name: str, made: Callable[[Any], Any]) -> None:
    owner = next(base for base in cls.__mro__ if name in vars(base))
    original = vars(owner)[name]
    _changed.append((owner, name, original))
    setattr(owner, name, made(original))


def _prepared(original: Any) -> Any:
    def make_train_function(self: Any, force: bool = False) -> Any:
        if api.is_initialized() and api.size() > 1:
            _scale_outside(self)
            if isinstance(self.optimizer, Distributed):
                made = engine.train_function(self, force=force)
                if made:
                    return None
        return original(self, force)

    return make_train_function


def _scale_outside(model: Any) -> None:
    """``compile`` puts a ``LossScaleOptimizer`` around the optimizer of a float16 model; the ranks' gradients
    are to be combined before it looks at them.
    """
    outer = model.optimizer
    if (
        isinstance(outer, LossScaleOptimizer)
        and not isinstance(outer, Distributed)
        and isinstance(outer.inner_optimizer, Distributed)
    ):
        wrap(outer, unwrap(outer.inner_optimizer))


def _peeking(original: Any) -> Any:
    def symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        adapter = getattr(iterator, "data_adapter", None)
        if data_batch is None and isinstance(adapter, _data.Batches):
            iterator, data_batch = None, adapter.peek()
        return original(self, iterator=iterator, data_batch=data_batch)

    return symbolic_build


def _building(original: Any) -> Any:
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if api.is_initialized() and api.size() > 1 and isinstance(self.optimizer, Distributed):
            self._symbolic_build(iterator=iterator, data_batch=data_batch)
            return None
        return original(self, iterator=iterator, data_batch=data_batch)

    return maybe_symbolic_build


def _beginning(original: Any) -> Any:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        self._hora_fit = Fit.of(self._model)  # callbacks have broadcast the variables by now
        self._hora_batch = 0
        if self._hora_fit is not None:
            self._hora_fit.begin()

    return on_train_begin


def _ending(original: Any) -> Any:
    def on_train_end(self: Any, logs: Any = None) -> None:
        fit = getattr(self, "_hora_fit", None)
        if fit is not None:
            fit.end()
        original(self, logs)

    return on_train_end


def _stepping(original: Any) -> Any:
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        original(self, batch, logs)
        fit = getattr(self, "_hora_fit", None)
        if fit is not None:
            last = self._hora_batch if self._hora_batch <= batch else 0
            fit.stepped(batch + 1 - last)
            self._hora_batch = batch + 1

    return on_train_batch_end


def _silent(original: Any) -> Any:
    def set_params(self: Any, params: Any) -> None:
        original(self, {**params, "verbose": 0})

    return set_params

"""Batch norm and random numbers of Keras's layers, as they are and as experiments want them."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend

from hora.adapter.recording.recorder import Recorder
from hora.keras._backend import engine
from hora.keras._batch_norm import moments
from hora.keras.verify._fit import around

__all__ = ["start"]

_NOISES = ("AlphaDropout", "GaussianDropout", "GaussianNoise")


def start(recorder: Recorder) -> None:
    """Look on from here on."""
    independent = "randomness" in recorder.apply

    def batch_norm(original: Any) -> Any:
        def _moments(layer: Any, inputs: Any, mask: Any) -> Any:
            recorder.uses.add("batch norm")
            shared = "batch-norm" in recorder.apply and recorder.size > 1
            return moments(layer, inputs, mask) if shared else original(layer, inputs, mask)

        return _moments

    def dropping(original: Any) -> Any:
        def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.uses.add("dropout")
            return inputs if independent else original(inputs, *args, **kwargs)

        return dropout

    def noisy(original: Any) -> Any:
        def call(layer: Any, inputs: Any, training: bool = False) -> Any:
            if not training:
                return original(layer, inputs, training=training)
            recorder.uses.add("dropout")
            return inputs if independent else original(layer, inputs, training=training)

        return call

    def uniform(original: Any) -> Any:
        def uniform(
            shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None
        ) -> Any:
            drawn = recorder.draws.drawn(shape, lambda rng, row: rng.uniform(minval, maxval, row))
            own = original(shape, minval=minval, maxval=maxval, dtype=dtype, seed=seed)
            return own if drawn is None else backend.cast(engine.native(drawn), own.dtype)

        return uniform

    def normal(original: Any) -> Any:
        def normal(
            shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None
        ) -> Any:
            drawn = recorder.draws.drawn(shape, lambda rng, row: rng.normal(mean, stddev, row))
            own = original(shape, mean=mean, stddev=stddev, dtype=dtype, seed=seed)
            return own if drawn is None else backend.cast(engine.native(drawn), own.dtype)

        return normal

    around(keras.layers.BatchNormalization, "_moments", batch_norm)
    around(backend.random, "dropout", dropping)
    around(backend.random, "uniform", uniform)
    around(backend.random, "normal", normal)
    for name in _NOISES:
        around(getattr(keras.layers, name), "call", noisy)

"""What happens inside the ranks of ``hora verify`` with a model of Keras: records of each step, and changes.

Train steps run as Python, operation by operation, so that what they compute can be looked at; they compute
the same. :mod:`hora.adapter.recording` has what the adapters share.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import keras

from hora.adapter.recording.recorder import recorder
from hora.keras._backend import BACKEND, api
from hora.keras.verify import _fit, _layers, _optimizer

__all__ = ["start"]


def start() -> None:
    """Look on from here on; called once, before the script makes a model."""
    one = recorder()
    if one.plan.float64:
        if BACKEND == "torch":  # losses and divisions are float32 there, whatever the layers are
            one.refuse(
                "Keras on PyTorch cannot compute everything in float64.",
                "Leave --float64 out, or set KERAS_BACKEND to tensorflow or jax.",
            )
        keras.config.set_floatx("float64")
    _seed(one.rank)
    looks = _fit.Fit(one)
    looks.start()
    _optimizer.Steps(one, looks).start()
    _layers.start(one)
    for module in {id(each): each for each in (sys.modules["hora.keras"], api)}.values():
        one.metrics.follow(module, summed=lambda args, kwargs: kwargs.get("op") is api.Sum)
    one.saves = "model.save"
    for name in ("save", "save_weights", "export"):
        setattr(keras.Model, name, one.leave_out(getattr(keras.Model, name)))


def _seed(rank: int) -> None:
    """What a script leaves to chance would differ from run to run; between ranks it still differs."""
    framework: Any = importlib.import_module(BACKEND)
    if BACKEND == "tensorflow":
        framework.random.set_seed(rank)
    elif BACKEND == "torch":
        framework.manual_seed(rank)

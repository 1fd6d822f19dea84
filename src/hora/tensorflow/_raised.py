"""Errors of Hora that were raised inside a graph come out of the ``tf.function`` as what they are.

What is raised by an operation that hands tensors to Python, TensorFlow turns into one of its own errors,
whose text holds that of the original. So the original is kept, and raised where the script called
the function.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function

from hora.core.errors import HoraError

__all__ = ["install", "keep"]

_kept: list[HoraError] = []


def keep(error: HoraError) -> None:
    """An error is on its way out of a graph."""
    _kept[:] = [error]


def install() -> None:
    """Let functions raise them, once and for all."""
    for kind in (polymorphic_function.Function, concrete_function.ConcreteFunction):
        kind.__call__ = _raising(kind.__call__)


def _raising(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except tf.errors.OpError:
            if not _kept or not tf.executing_eagerly():
                raise
            raise _kept.pop() from None

    return call

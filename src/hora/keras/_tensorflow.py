"""Keras on TensorFlow: gradients travel by ``hora.tensorflow``, inside the compiled train step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import hora.tensorflow as hora
from hora.keras._state import ObjectState as State
from hora.keras._state import run
from hora.tensorflow._grouped import reduce_group

__all__ = ["State", "as_one", "native", "reduce", "run", "train_function"]


def reduce(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    op: Any,
    compression: Any,
    prescale: float,
    postscale: float,
    sparse_as_dense: bool,
    process_set: Any,
    name: str | None,
    scaled: bool,
) -> list[Any]:
    """Whole tensors in one message for each dtype; rows of an embedding as rows."""
    options = {
        "op": op,
        "compression": compression,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "process_set": process_set,
    }
    result = list(gradients)
    dense: list[int] = []
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue  # on every rank: they run the same graph, or are told that they do not
        if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
            result[index] = hora.allreduce(gradient, name=f"{name or 'gradients'}.{index}", **options)
        else:
            dense.append(index)
    if dense:
        given = [tf.convert_to_tensor(gradients[index]) for index in dense]
        of = [variables[index] for index in dense]
        steps = hora.context().steps_of(of, process_set, scaled=scaled)
        reduced = reduce_group(
            given,
            name=name or "gradients",
            training=steps,
            names=() if steps is None else steps.names,
            **options,
        )
        for index, gradient in zip(dense, reduced, strict=True):
            result[index] = gradient
    return result


def as_one() -> bool:
    """Whether ranks that do not take part run the same program nevertheless."""
    return False


def native(value: NDArray[Any]) -> Any:
    """An array as a tensor, of the same dtype."""
    return tf.constant(np.asarray(value))


def train_function(model: Any, *, force: bool) -> bool:
    """Keras makes it; XLA must not compile it, as it has no place for TensorFlow's collectives."""
    if model.jit_compile:
        model.jit_compile = False
        if hora.rank() == 0:
            print(
                f"hora: the train step of {model.name!r} is not compiled by XLA (jit_compile=False), which "
                "cannot compile TensorFlow's collectives.",
                file=sys.stderr,
                flush=True,
            )
    return False

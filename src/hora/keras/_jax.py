"""Keras on JAX: gradients travel by ``hora.jax``; the train step runs inside ``hora.jax.spmd``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from numpy.typing import NDArray

import hora.jax as hora
from hora.jax._traced import is_inside
from hora.keras._state import ObjectState as State
from hora.keras._state import run

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
) -> list[Any]:
    """One flat message for each dtype. Every variable has a gradient here, and all are whole arrays."""
    return list(
        hora.grouped_allreduce(
            list(gradients),
            name=name or "gradients",
            op=op,
            compression=compression,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
    )


def as_one() -> bool:
    """Whether ranks that do not take part run the same program nevertheless: in a step of all ranks."""
    return is_inside()


def native(value: NDArray[Any]) -> Any:
    """An array of this rank."""
    return jnp.asarray(value)


def train_function(model: Any, *, force: bool) -> bool:
    """A train step that all ranks run together, each on its own batch and with variables of its own.

    Keras keeps the variables outside of it, as arrays of this rank alone: so everything else that Keras does
    with them (``evaluate``, metrics, ``save``) is this rank's affair, and needs no other.
    """
    if model.run_eagerly or not model.jit_compile:
        return False
    if model.train_function is not None and not force:
        return True
    step = hora.spmd(model.train_step, split=1, donate=0)
    model.train_function = model._make_function(lambda state, data: hora.local(step(state, data)))
    return True

"""Keras on JAX: gradients travel by ``hora.jax``; the train step runs inside ``hora.jax.spmd``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from numpy.typing import NDArray

import hora.jax as hora
from hora.jax._notes import note
from hora.jax._own import Own
from hora.jax._traced import is_inside
from hora.keras._state import ObjectState as State
from hora.keras._state import run

__all__ = ["State", "as_one", "native", "reduce", "run", "train_function"]


_count = itertools.count(1)


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
    """One flat message for each dtype. Every variable has a gradient here, and all are whole arrays."""
    if is_inside():
        note(list(gradients), names=[each.path for each in variables], scaled=scaled)
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
    form = _Form(model)

    def step(state: Any, data: Any) -> Any:
        logs, state = model.train_step(form.opened(state), data)
        return Own(logs), form.closed(state)

    step.__name__ = f"train_step {next(_count)}"  # Keras's own names may differ between the ranks
    compiled = hora.spmd(step, split=1, donate=0)

    def together(state: Any, data: Any) -> Any:
        logs, state = hora.local(compiled(form.closed(state), data))
        return logs.inner, form.opened(state)

    model.train_function = model._make_function(together)
    return True


class _Form:
    """The state of a train step as Keras has it, and as the guard sees what is to be equal on all ranks."""

    def __init__(self, model: Any) -> None:
        options: Any = model.optimizer._options
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        alone = bool(options.local_layers) or options.process_set is not hora.global_process_set
        self._own = (alone, True, alone or bool(inner.gradient_accumulation_steps), True)
        # The guard shows names. JAX sorts by them, and they may differ between ranks: numbers come first.
        self._names = [f"{at:05d} {each.path}" for at, each in enumerate(model.trainable_variables)]

    def closed(self, state: Any) -> Any:
        named = dict(zip(self._names, state[0], strict=True))
        parts = (named, *state[1:])
        return tuple(Own(part) if own else part for part, own in zip(parts, self._own, strict=True))

    def opened(self, state: Any) -> Any:
        named, *rest = (part.inner if own else part for part, own in zip(state, self._own, strict=True))
        return ([named[name] for name in self._names], *rest)

"""What happens inside the ranks of ``hora verify`` with JAX: records of each step, and changes.

A step that the script gives to ``jax.jit`` or ``hora.spmd`` runs as Python, operation by operation, on this
rank's own arrays, so that what it computes can be looked at; it computes the same.
"""

from __future__ import annotations

import jax

import hora.jax as hora
from hora.adapter.recording.recorder import recorder
from hora.jax.verify._axis import Axis
from hora.jax.verify._optax import Optax
from hora.jax.verify._steps import Steps

__all__ = ["start"]


def start() -> None:
    """Look on from here on; called once, before the script takes anything from JAX."""
    one = recorder()
    if one.plan.float64:
        jax.config.update("jax_enable_x64", True)
    axis = Axis()
    axis.start()
    steps = Steps(one, axis)
    steps.start()
    Optax(one, steps).start()
    one.metrics.follow(hora, summed=lambda args, kwargs: kwargs.get("op") is hora.Sum)

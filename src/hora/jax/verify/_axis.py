"""The axis of the ranks, for steps that run as Python: what is exchanged along it is exchanged by calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hora.jax as hora
from hora.jax._mesh import AXIS

__all__ = ["Axis"]

_plain = hora.allreduce


class Axis:
    """What stands in for the axis.

    Attributes:
        inside: whether a step of ``hora.spmd`` is running.
    """

    def __init__(self) -> None:
        self.inside = False

    def start(self) -> None:
        """Replace what uses the axis."""
        replaced: Any = lax
        for name, op in (("pmean", hora.Average), ("psum", hora.Sum), ("pmax", hora.Max), ("pmin", hora.Min)):
            setattr(replaced, name, self._reduction(getattr(lax, name), op))
        replaced.axis_index = self._known(lax.axis_index, lambda: jnp.asarray(hora.rank(), jnp.int32))
        replaced.axis_size = self._known(lax.axis_size, hora.size)
        face: Any = hora
        face.allreduce = self._allreduce(_plain)

    def _reduction(self, original: Any, op: Any) -> Any:
        def reduce(x: Any, axis_name: Any, **options: Any) -> Any:
            if not self.inside or not _is_ours(axis_name) or _is_hora(sys._getframe(1)):
                return original(x, axis_name, **options)
            return jax.tree.map(lambda leaf: _reduced(op, jnp.asarray(leaf)), x)

        return reduce

    def _known(self, original: Any, value: Callable[[], Any]) -> Any:
        def known(axis_name: Any) -> Any:
            ours = self.inside and _is_ours(axis_name) and not _is_hora(sys._getframe(1))
            return value() if ours else original(axis_name)

        return known

    def _allreduce(self, original: Any) -> Any:
        """``hora.allreduce`` of what a gradient is computed through: inside jit it has one."""

        @functools.wraps(original)
        def allreduce(value: Any, *args: Any, op: Any = hora.Average, **options: Any) -> Any:
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
            if not traced or args or options.keys() - {"name"} or op not in (hora.Average, hora.Sum):
                return original(value, *args, op=op, **options)
            return jax.tree.map(functools.partial(_reduced, op), value)

        return allreduce


def _is_hora(frame: FrameType) -> bool:
    """Whether it is the adapter that asks, which then uses the real axis, or none."""
    return str(frame.f_globals.get("__name__")).startswith("hora.")


def _is_ours(name: Any) -> bool:
    return bool(name in (AXIS, (AXIS,), [AXIS]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced(op: Any, value: Any) -> Any:
    return _plain(value, op=op)


def _forward(op: Any, value: Any) -> tuple[Any, None]:
    return _plain(value, op=op), None


def _backward(op: Any, residual: None, gradient: Any) -> tuple[Any]:
    return (_plain(gradient, op=op),)


_reduced.defvjp(_forward, _backward)

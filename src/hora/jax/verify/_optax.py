"""Follows Optax: updates, learning rates and clipping, and changes them where an experiment does."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from optax._src import transform as optax_transform

import hora.jax as hora
from hora.adapter.recording.recorder import Recorder
from hora.jax import _optimizer
from hora.jax._own import Accumulated
from hora.jax.verify._steps import Steps, is_traced, named

__all__ = ["Optax"]

_allreduce = hora.allreduce
_CLIPS = ("clip", "clip_by_block_rms", "clip_by_global_norm", "adaptive_grad_clip")


class Optax:
    """The updates of one rank."""

    def __init__(self, recorder: Recorder, steps: Steps) -> None:
        self._recorder = recorder
        self._steps = steps
        self._depth = 0
        self._made = 0
        self._used: dict[str, NDArray[Any]] = {}
        self._rates: list[float] = []
        self._optimizer = 0
        self._skipped = False

    def start(self) -> None:
        """Look on from here on."""
        for kind in (optax.GradientTransformation, optax.GradientTransformationExtraArgs):
            made: Any = kind
            made.__new__ = self._new(made.__new__)
        replaced: Any = optax
        module: Any = optax_transform
        module.scale_by_learning_rate = self._rate(module.scale_by_learning_rate)
        replaced.scale_by_learning_rate = module.scale_by_learning_rate
        replaced.apply_updates = self._apply(optax.apply_updates)
        for name in _CLIPS:
            setattr(replaced, name, self._clip(getattr(optax, name)))
        rule: Any = _optimizer._Rule
        rule.__init__ = self._uncompiled(rule.__init__)
        rule.reduce = self._reduce(rule.reduce)

    def _new(self, original: Any) -> Any:
        """Every transformation is made here; the outermost update of a step is the optimizer's."""

        def new(kind: Any, init: Any, update: Any) -> Any:
            self._made += 1
            number = self._made

            @functools.wraps(init)
            def first(params: Any) -> Any:
                state = init(params)
                self._steps.is_state((params, state))
                return state

            @functools.wraps(update)
            def following(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
                if self._depth or not self._steps.following:
                    return update(updates, state, params, **extra)
                return self._updated(number, update, updates, state, params, extra)

            return original(kind, first, following)

        return new

    def _updated(  # noqa: PLR0917 - Optax's order, behind which update it is
        self, number: int, update: Any, gradients: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> Any:
        recorder = self._recorder
        if is_traced((gradients, state, params)):
            recorder.refuse(
                "hora verify cannot look into this step: optimizer.update() is called inside a program that "
                "is compiled, or a loop of JAX.",
                "Call it in a step of hora.spmd or jax.jit that the script itself makes, once per call, and "
                "not in lax.scan or lax.fori_loop.",
            )
        recorder.module = recorder.module or "hora.jax"
        if not recorder.passes:
            recorder.begin_pass()
        params = self._steps.replaced(params)
        changed = self._changed(gradients)
        self._used, self._rates, self._optimizer = named(changed), [], number
        self._depth += 1
        try:
            updates, state = update(changed, state, params, **extra)
        finally:
            self._depth -= 1
        waits = isinstance(state, Accumulated) and int(state.passes)
        self._skipped = bool(waits)
        return updates, state

    def _changed(self, gradients: Any) -> Any:
        """The gradients as an experiment wants them."""
        recorder = self._recorder
        leaves, tree = jax.tree.flatten(gradients)
        if recorder.unclipped and recorder.raw.keys() == named(gradients).keys():
            leaves = [jnp.asarray(recorder.raw[name]) for name in named(gradients)]
        if recorder.averages:
            leaves = _allreduce(leaves, op=hora.Average, name="hora.verify")
        factor = recorder.factor()
        if factor != 1.0:
            leaves = [leaf * jnp.asarray(factor, leaf.dtype) for leaf in leaves]
        return jax.tree.unflatten(tree, leaves)

    def _uncompiled(self, original: Any) -> Any:
        def init(rule: Any, *args: Any, **kwargs: Any) -> None:
            original(rule, *args, **kwargs)
            rule._compiled = rule.optimizer.update

        return init

    def _reduce(self, original: Any) -> Any:
        def reduce(rule: Any, gradients: Any, passes: int) -> Any:
            if rule.style != "gspmd" and self._depth and rule.process_set.included():
                self._steps.check_compiled()
            weight = self._recorder.weight()
            if weight != 1.0:
                gradients = jax.tree.map(lambda leaf: leaf * jnp.asarray(weight, leaf.dtype), gradients)
            reduced = original(rule, gradients, passes)
            if self._depth == 1:
                self._used = named(reduced)
            return reduced

        return reduce

    def _apply(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply_updates(params: Any, updates: Any) -> Any:
            recorder = self._recorder
            if not self._steps.following or is_traced((params, updates)) or not self._optimizer:
                return original(params, updates)
            params = self._steps.replaced(params)
            after = original(params, updates)
            if not self._skipped:
                number, self._optimizer = self._optimizer, 0
                recorder.step(
                    optimizer=number,
                    rates=self._rates[:1],
                    gradients=_arrays(self._used),
                    before=_arrays(named(params)),
                    parameters=_arrays(named(after)),
                    buffers={},
                )
                self._steps.first = None
            return after

        return apply_updates

    def _rate(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale_by_learning_rate(learning_rate: Any, **options: Any) -> Any:
            plain = original(learning_rate, **options)

            def update(updates: Any, state: Any, params: Any = None) -> Any:
                scaled, after = plain.update(updates, state, params)
                own = learning_rate(state.count) if callable(learning_rate) else learning_rate
                if is_traced((own, scaled)):
                    return scaled, after
                rate = float(own)
                wanted = self._recorder.rate(rate, len(self._rates))
                self._rates.append(wanted)
                if wanted != rate:
                    factor = wanted / rate
                    scaled = jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), scaled)
                return scaled, after

            return optax.GradientTransformation(plain.init, update)

        return scale_by_learning_rate

    def _clip(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            plain = original(*args, **kwargs)

            def update(updates: Any, state: Any, params: Any = None) -> Any:
                self._recorder.uses.add("clipping")
                if "clipping" in self._recorder.apply:
                    return updates, state
                return plain.update(updates, state, params)

            return optax.GradientTransformation(plain.init, update)

        return clip


def _arrays(values: dict[str, Any]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(value) for name, value in values.items()}

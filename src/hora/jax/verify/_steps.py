"""Runs the script's own steps as Python, and follows what they compute gradients of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import hora.jax as hora
from hora.adapter.frames import called_by_user, line
from hora.adapter.recording.recorder import Recorder
from hora.core.errors import GradientError
from hora.jax import _loader, _spmd
from hora.jax._mesh import is_global
from hora.jax.verify._axis import Axis

__all__ = ["Steps", "is_traced", "named"]


class Steps:
    """The steps of one rank.

    Attributes:
        first: parameters to start from instead of the script's, until its first step is over.
        compiled: whether a step of plain ``jax.jit`` is running.
    """

    def __init__(self, recorder: Recorder, axis: Axis) -> None:
        self._recorder = recorder
        self._axis = axis
        self._loaders: dict[int, tuple[int, Any]] = {}
        self._state: dict[int, Any] = {}
        self._depth = 0
        self._grads = 0
        self.first: list[NDArray[Any]] | None = None
        self.compiled = False

    @property
    def following(self) -> bool:
        """Whether it is a training of the script's own by JAX that is recorded."""
        recorder = self._recorder
        ours = recorder.in_charge("hora.jax") or recorder.module == "hora.keras"
        return recorder.active and ours and not recorder.in_step

    def start(self) -> None:
        """Look on from here on."""
        face: Any = hora
        jax.jit = self._jit(jax.jit)
        jax.shard_map = self._shard_map(jax.shard_map)
        jax.value_and_grad = self._gradient(jax.value_and_grad, lambda found: found[1])
        jax.grad = self._gradient(jax.grad, lambda found: found)
        for name in ("uniform", "normal", "bernoulli"):
            setattr(jax.random, name, self._draw(getattr(jax.random, name), name))
        step: Any = _spmd._Step
        step.__call__ = self._spmd(step.__call__)
        face.global_array = self._global_array(hora.global_array)
        loader: Any = _loader.Loader
        loader.__iter__ = self._iter(loader.__iter__)

    def is_state(self, tree: Any) -> None:
        """These arrays are parameters or an optimizer's state, and no batch."""
        self._state = {id(leaf): leaf for leaf in jax.tree.leaves(tree)} | self._state

    # --- steps ----------------------------------------------------------------------------------

    def _jit(self, original: Any) -> Any:
        @functools.wraps(original)
        def jit(fun: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not called_by_user():
                return original(*(() if fun is None else (fun,)), *args, **kwargs)
            if fun is None:
                return self._plain
            return self._plain(fun)

        return jit

    def _plain(self, function: Any) -> Any:
        """The function that was to be compiled."""

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._depth or is_traced((args, kwargs)):
                return function(*args, **kwargs)
            wide = any(is_global(leaf) for leaf in jax.tree.leaves((args, kwargs)))
            args, kwargs = self._given((args, kwargs))
            if not wide:
                args = self._batch(getattr(function, "__name__", "step"), args, range(len(args)))
            before, self.compiled = self.compiled, not wide and hora.is_initialized() and hora.size() > 1
            return self._run(function, args, kwargs, restore=before)

        return step

    def _run(self, function: Any, args: Any, kwargs: Any, *, restore: bool) -> Any:
        self._depth += 1
        try:
            found = function(*args, **kwargs)
        finally:
            self._depth -= 1
            self.compiled = restore
        self._state = {id(leaf): leaf for leaf in jax.tree.leaves(found)}
        return found

    def _spmd(self, original: Any) -> Any:
        def call(step: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._recorder.active or self._recorder.in_step or is_traced((args, kwargs)):
                return original(step, *args, **kwargs)
            if kwargs:
                args = step._ordered(args, kwargs)
            args, _ = self._given((args, {}))
            args = self._batch(step._name, args, sorted(step._split))
            self._axis.inside = True
            try:
                return self._run(step._function, args, {}, restore=self.compiled)
            finally:
                self._axis.inside = False

        return call

    def _shard_map(self, original: Any) -> Any:
        @functools.wraps(original)
        def shard_map(*args: Any, **kwargs: Any) -> Any:
            if called_by_user() and self._recorder.active:
                self._recorder.refuse(
                    "hora verify cannot look into a step of jax.shard_map, whose arrays are parts of global "
                    "ones.",
                    "Write step = hora.spmd(step, split=...), which is shard_map over the ranks.",
                )
            return original(*args, **kwargs)

        return shard_map

    def _given(self, tree: Any) -> Any:
        """Arguments as arrays of this rank: global ones whole."""

        def own(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and is_global(leaf):
                part = leaf.addressable_data(0)
                leaf = part if leaf.is_fully_replicated else hora.allgather(part)
            return _wide(leaf) if self._recorder.plan.float64 else leaf

        return jax.tree.map(own, tree)

    def _batch(self, name: str, args: tuple[Any, ...], places: Any) -> tuple[Any, ...]:
        """The arguments, of which those in ``places`` that are no state may be a batch."""
        if not self._recorder.active:
            return args
        chosen = [place for place in places if _has_rows(args[place]) and not self._is_known(args[place])]
        if not chosen:
            return args
        rows = len(jax.tree.leaves(args[chosen[0]])[0])
        chosen = [place for place in chosen if len(jax.tree.leaves(args[place])[0]) == rows]
        leaves, tree = jax.tree.flatten([args[place] for place in chosen])
        leaves = self._recorder.sources.handed(f"the arguments of {name}", leaves, native=_like)
        batch = dict(zip(chosen, jax.tree.unflatten(tree, leaves), strict=True))
        return tuple(batch.get(place, argument) for place, argument in enumerate(args))

    def _is_known(self, tree: Any) -> bool:
        return any(id(leaf) in self._state for leaf in jax.tree.leaves(tree))

    # --- gradients ------------------------------------------------------------------------------

    def _gradient(self, original: Any, gradients: Callable[[Any], Any]) -> Any:
        @functools.wraps(original)
        def transform(fun: Any, argnums: Any = 0, *options: Any, **more: Any) -> Any:
            made = original(fun, argnums, *options, **more)
            if not called_by_user():
                return made

            @functools.wraps(fun)
            def function(*args: Any, **kwargs: Any) -> Any:
                recorder = self._recorder
                if self._grads or not self.following or is_traced((args, kwargs)):
                    return made(*args, **kwargs)
                recorder.module = recorder.module or "hora.jax"
                recorder.begin_pass()
                if isinstance(argnums, int) and argnums < len(args):
                    self.is_state(args[argnums])
                    new = self._replaced(args[argnums])
                    args = (*args[:argnums], new, *args[argnums + 1 :])
                    if self._depth == 0:  # outside of any step its arguments are all that is known
                        others = [place for place in range(len(args)) if place != argnums]
                        args = self._batch("a gradient", args, others)
                self._grads += 1
                try:
                    found = made(*args, **kwargs)
                finally:
                    self._grads -= 1
                recorder.end_pass()
                for name, gradient in named(gradients(found)).items():
                    recorder.add_raw(name, np.asarray(gradient))
                return found

            return function

        return transform

    def _replaced(self, parameters: Any) -> Any:
        """The parameters, or in the first step those of another run."""
        recorder = self._recorder
        if recorder.steps:
            return parameters
        leaves, tree = jax.tree.flatten(parameters)
        if self.first is None:
            self.first = recorder.first_parameters([np.asarray(leaf) for leaf in leaves])
        return self.replaced(parameters) if self.first is not None else jax.tree.unflatten(tree, leaves)

    def replaced(self, parameters: Any) -> Any:
        """As many of these as there are first parameters of another run, or these."""
        leaves, tree = jax.tree.flatten(parameters)
        if self._recorder.steps or self.first is None or len(leaves) != len(self.first):
            return parameters
        new = [jnp.asarray(value, leaf.dtype) for value, leaf in zip(self.first, leaves, strict=True)]
        return jax.tree.unflatten(tree, new)

    def check_compiled(self) -> None:
        """Raise what a step of plain ``jax.jit`` raises where it averages: there it could not tell."""
        if self.compiled:
            raise GradientError(
                "DistributedOptimizer.update() was traced by plain jit, where it cannot tell a rank's own "
                "gradients from those of global arrays.",
                fix="Write step = hora.spmd(step, split=...) instead of jax.jit(step).",
            )

    # --- batches and random numbers -------------------------------------------------------------

    def _global_array(self, original: Any) -> Any:
        @functools.wraps(original)
        def global_array(value: Any) -> Any:
            leaves, tree = jax.tree.flatten(value)
            leaves = self._recorder.sources.handed(f"global_array of {line()}", leaves, native=_like)
            return original(jax.tree.unflatten(tree, leaves))

        return global_array

    def _iter(self, original: Any) -> Any:
        def iterate(loader: Any) -> Iterator[Any]:
            number = self._loaders.setdefault(id(loader), (len(self._loaders), loader))[0]
            for chosen in loader.indices():
                leaves, tree = jax.tree.flatten(loader._source.take(chosen))
                handed = self._recorder.sources.handed(
                    str(number), leaves, native=_like, samples=chosen.tolist()
                )
                yield jax.tree.unflatten(tree, handed)

        return iterate

    def _draw(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def draw(key: Any, *args: Any, **kwargs: Any) -> Any:
            own = original(key, *args, **kwargs)
            if not self._grads or is_traced(own):
                return own
            if name == "bernoulli":
                p = np.asarray(kwargs.get("p", args[0] if args else 0.5))
                drawn = self._recorder.draws.drawn(own.shape, lambda rng, row: rng.random(row))
                return own if drawn is None else jnp.asarray(drawn < p)
            if (len(args) > 2 or {"minval", "maxval"} & kwargs.keys()) and name == "uniform":
                return own
            kind = np.random.Generator.random if name == "uniform" else np.random.Generator.standard_normal
            drawn = self._recorder.draws.drawn(own.shape, lambda rng, row: kind(rng, tuple(row)))
            return own if drawn is None else jnp.asarray(drawn, own.dtype)

        return draw


def is_traced(tree: Any) -> bool:
    """Whether there is a tracer in it, of a transformation that the script has made."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def named(tree: Any) -> dict[str, Any]:
    """The leaves by names that a user knows."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def _has_rows(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return (
        bool(leaves)
        and all(
            isinstance(leaf, np.ndarray | jax.Array)
            and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for leaf in leaves
        )
        and all(np.ndim(leaf) and len(leaf) == len(leaves[0]) for leaf in leaves)
    )


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | jax.Array) and leaf.dtype in (np.float32, jnp.bfloat16, np.float16):
        return leaf.astype(np.float64)
    return leaf


def _like(array: NDArray[Any], leaf: Any) -> Any:
    return array if isinstance(leaf, np.ndarray) else jnp.asarray(array, leaf.dtype)

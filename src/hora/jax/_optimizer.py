"""``DistributedOptimizer``: the user's Optax optimizer, with gradients that are averaged over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.jax import _traced
from hora.jax._collectives import reduce_tree
from hora.jax._compression import Compression, Compressor
from hora.jax._context import required
from hora.jax._mesh import AXIS, is_global
from hora.jax._notes import note
from hora.jax._own import Accumulated, Own
from hora.jax._process_sets import ProcessSet, global_process_set, member_set
from hora.jax._reduce import varies
from hora.jax._training import HostSteps

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: optax.GradientTransformation,
    *,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    style: Literal["auto", "gspmd"] = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Let an Optax optimizer update by gradients averaged over all ranks.

    ``update`` works in three places, and does what each needs:

    - inside :func:`hora.spmd` or ``jax.shard_map`` over ``hora.mesh()``: the gradients of this rank's share
    of
      the batch are averaged, small ones together in one message;
    - outside of ``jit``, on arrays of this rank: the same, as a call of its own;
    - with ``style="gspmd"`` inside ``jax.jit`` on global arrays: XLA has averaged them already, as the loss
    is
      the mean over the global batch, and nothing is added.

    Args:
        optimizer: any Optax transformation.
        compression: how gradients travel: ``Compression.fp16`` or ``bf16``.
        backward_passes_per_step: with more than 1, gradients add up over so many calls of ``update``, which
            return zeros, and are reduced in the last, as the mean of the passes.
        op: ``Average``, ``Sum``, or ``Adasum``: each rank's updates, made of its own gradients, are combined.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the average after.
        process_set: the ranks that average; on others the optimizer updates by its own gradients.
        style: ``"gspmd"`` for ``jax.jit`` on global arrays, where nobody could tell from a rank's own.

    Returns:
        An Optax transformation. Its state is that of ``optimizer``; with ``backward_passes_per_step``
        an :class:`Accumulated`, with ``Adasum`` inside an ``Own``.

    Raises:
        GradientError: what does not go together. Later: gradients traced by plain ``jit`` without a style, or
            that JAX has summed already (``check_vma=True``).
    """
    required("DistributedOptimizer")
    rule = _Rule(
        optax.with_extra_args_support(optimizer),
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        style=style,
    )
    rule.check(backward_passes_per_step)
    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(rule.init, rule.update)
    many = _Passes(rule, backward_passes_per_step)
    return optax.GradientTransformationExtraArgs(many.init, many.update)


class _Rule:
    """One optimizer, and how its gradients are reduced."""

    def __init__(
        self,
        optimizer: optax.GradientTransformationExtraArgs,
        *,
        compression: Any,
        op: ReduceOp,
        predivide: float,
        process_set: ProcessSet,
        style: str,
    ) -> None:
        self.optimizer = optimizer
        self.compression = compression
        self.op = op
        self.predivide = predivide
        self.process_set = process_set
        self.style = style
        self._compiled = jax.jit(optimizer.update)
        self._steps: HostSteps | None = None

    def check(self, passes: int) -> None:
        """Raise GradientError for what cannot be meant."""
        if self.op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
            raise GradientError(
                f"DistributedOptimizer combines ranks by Average, Sum or Adasum, not by {self.op!r}.",
                fix="Write op=hora.Average, or reduce with hora.allreduce(gradients, op=...) yourself.",
            )
        if not isinstance(passes, int) or passes < 1:
            raise GradientError(
                f"backward_passes_per_step={passes!r} is not a number of 1 or more.",
                fix="Give the number of backward passes between two updates.",
            )
        if not self.predivide > 0 or (self.predivide != 1 and self.op is not ReduceOp.Average):
            raise GradientError(
                f"gradient_predivide_factor={self.predivide!r} goes with op=Average, and is above 0.",
                fix="Leave it out.",
            )
        if self.style not in ("auto", "gspmd"):
            raise GradientError(
                f"style={self.style!r} is not known.", fix='Write style="gspmd", or leave it out.'
            )
        if self.style == "gspmd" and (
            self.op is not ReduceOp.Average or self.process_set is not global_process_set
        ):
            raise GradientError(
                'style="gspmd" computes on the global batch, whose gradients are averages over all ranks.',
                fix="Leave op and process_set out, or use hora.spmd and no style.",
            )
        if self.process_set.included() is None:
            member_set(self.process_set, function="DistributedOptimizer")

    def init(self, params: Any) -> Any:
        """The state for these parameters."""
        if self.style == "gspmd" and required("DistributedOptimizer").world.size > 1:
            leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
            own = [leaf for leaf in leaves if not isinstance(leaf, jax.core.Tracer) and not is_global(leaf)]
            if own:
                raise GradientError(
                    f'style="gspmd" needs global parameters, but {len(own)} of {len(leaves)} lie on this '
                    "rank "
                    "alone: every rank would train a model of its own.",
                    fix="Write params = hora.replicate(hora.broadcast_parameters(params)) first.",
                )
        state = self.optimizer.init(params)
        return Own(state) if self.op is ReduceOp.Adasum else state

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """One update by the ranks' gradients."""
        if self.op is ReduceOp.Adasum:
            changes, state = self.apply(updates, state, params, extra)
            return self.averaged(changes, 1, None), state
        return self.apply(self.averaged(updates, 1, params), state, params, extra)

    def apply(self, updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        """What the optimizer itself makes of gradients; compiled where the caller does not compile."""
        if isinstance(state, Own):
            changes, inner = self.apply(updates, state.inner, params, extra)
            return changes, Own(inner)
        leaves = jax.tree.leaves((updates, state, params, extra))
        if _is_traced(leaves) or not all(isinstance(leaf, jax.Array) for leaf in leaves):
            made: tuple[Any, Any] = self.optimizer.update(updates, state, params, **extra)
            return made
        compiled: tuple[Any, Any] = self._compiled(updates, state, params, **extra)
        return compiled

    def averaged(self, gradients: Any, passes: int, params: Any) -> Any:
        """The gradients of these parameters, reduced over the ranks, as the guard sees it."""
        steps = self._watched(gradients)
        if steps is not None:
            steps.before(gradients, params)
        reduced = self.reduce(gradients, passes)
        if steps is not None:
            steps.after()
        return reduced

    def reduce(self, gradients: Any, passes: int) -> Any:
        """The gradients, reduced over the ranks; of several passes, their mean."""
        if passes > 1:
            gradients = jax.tree.map(lambda sums: sums / jnp.asarray(passes, sums.dtype), gradients)
        if self.style == "gspmd" or not self.process_set.included():
            return gradients
        if _traced.is_inside():
            _refuse_summed(gradients)
            note(gradients)
        elif _is_traced(jax.tree.leaves(gradients)):
            raise GradientError(
                "DistributedOptimizer.update() was traced by plain jit, where it cannot tell a rank's own "
                "gradients, which have to be averaged, from those of global arrays, which XLA has averaged.",
                fix="Write step = hora.spmd(step, split=...) instead of jax.jit(step); or, if the batch "
                "and the "
                'parameters are global arrays, DistributedOptimizer(..., style="gspmd").',
            )
        return reduce_tree(
            gradients,
            function="average gradients",
            op=self.op,
            compression=self.compression,
            prescale_factor=1 / self.predivide,
            postscale_factor=self.predivide,
            process_set=self.process_set,
        )

    def _watched(self, gradients: Any) -> HostSteps | None:
        """Who looks at gradients outside of ``jit``; inside, they are noted."""
        watch = required("DistributedOptimizer").watch
        members = self.process_set.members
        if watch is None or len(members) == 1 or not self.process_set.included():
            return None
        if self.style == "gspmd" or _traced.is_inside() or _is_traced(jax.tree.leaves(gradients)):
            return None
        if self._steps is None or self._steps.reporter is not watch.reporter:
            self._steps = HostSteps(watch, members)
        return self._steps


class _Passes:
    """An optimizer whose gradients add up over several backward passes."""

    def __init__(self, rule: _Rule, passes: int) -> None:
        self._rule = rule
        self._passes = passes

    def init(self, params: Any) -> Accumulated:
        """The state for these parameters."""
        inner = self._rule.init(params)
        return Accumulated(inner, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(self, updates: Any, state: Accumulated, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Add gradients up; after so many passes, one update."""
        sums = jax.tree.map(jnp.add, state.sums, updates)
        step = functools.partial(self._step, extra=extra)
        if _is_traced(jax.tree.leaves((updates, state, params))):
            last = state.passes + 1 == self._passes
            traced: tuple[Any, Any] = lax.cond(last, step, self._skip, sums, state, params)
            return traced
        return (step if int(state.passes) + 1 == self._passes else self._skip)(sums, state, params)

    def _step(self, sums: Any, state: Accumulated, params: Any, *, extra: dict[str, Any]) -> tuple[Any, Any]:
        rule = self._rule
        if rule.op is ReduceOp.Adasum:
            mean = jax.tree.map(lambda each: each / jnp.asarray(self._passes, each.dtype), sums)
            changes, inner = rule.apply(mean, state.inner, params, extra)
            changes = rule.averaged(changes, 1, None)
        else:
            changes, inner = rule.apply(rule.averaged(sums, self._passes, params), state.inner, params, extra)
        zeros = jax.tree.map(jnp.zeros_like, sums)
        return changes, Accumulated(inner, zeros, jnp.zeros_like(state.passes))

    def _skip(self, sums: Any, state: Accumulated, params: Any) -> tuple[Any, Any]:
        del params
        nothing = jax.tree.map(jnp.zeros_like, sums)
        return nothing, Accumulated(state.inner, sums, state.passes + 1)


def _is_traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _refuse_summed(gradients: Any) -> None:
    """Raise GradientError where JAX has added the ranks' gradients up already.

    Under ``check_vma=True`` the gradient of a parameter that is the same on all ranks is their sum; or their
    mean, if the loss was one. Nobody can tell which, and a second average would be wrong by the number of
    ranks.
    """
    if not varies(lax.axis_index(AXIS), AXIS):
        return  # check_vma=False: gradients are those of this rank
    same = [leaf for leaf in jax.tree.leaves(gradients) if not varies(leaf, AXIS)]
    if same:
        raise GradientError(
            f"{len(same)} gradients are the same on all ranks already: jax.shard_map(check_vma=True) adds "
            "up those of parameters that all ranks share.",
            fix="Write hora.spmd(step, split=...) or jax.shard_map(..., check_vma=False), so that each "
            "rank keeps its own until DistributedOptimizer averages them; or use the plain optimizer and "
            "a loss that is a lax.pmean.",
        )


Update = Callable[..., tuple[Any, Any]]

"""What the guard sees of compiled steps: what they take and give, and what they note of gradients.

``hora.spmd`` takes its word for it that parameters are the same on all ranks, and so does JAX: arrays that
a program calls replicated are never compared. So the guard gets fingerprints of them, before the first step
and after some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hora.adapter.prints import MOST, digest, is_due, sample
from hora.adapter.training import Training, fault, found, totals
from hora.adapter.watch import Watch, here, unharmed
from hora.jax._notes import named
from hora.jax._own import Accumulated, Own

__all__ = ["HostSteps", "Seen", "Steps"]


class Seen:
    """What one step leaves behind until it has ended.

    Attributes:
        number: of the step, from 1.
        inputs: numbers for what it was fed.
        sums: those of this rank's gradients; None: it notes none.
        names: of these; None: as with no sums.
        scaled: whether gradients may overflow.
        results: where no gradients are noted.
    """

    __slots__ = ("inputs", "names", "number", "results", "scaled", "sums")

    def __init__(self, number: int, inputs: Sequence[int]) -> None:
        self.number, self.inputs = number, inputs
        self.sums: jax.Array | None = None
        self.names: Sequence[str] = ()
        self.scaled = False
        self.results: Any = None


class Steps:
    """Those of one compiled step.

    Args:
        watch: that of the job.
        name: of the step.
    """

    def __init__(self, watch: Watch, name: str) -> None:
        self.reporter = watch.reporter
        self._watch = watch
        self._name = name
        self._training: Training | None = None
        self._begun = 0
        self._trains = False

    @property
    def broken(self) -> bool:
        """Whether a fault has ended the watch."""
        return self._watch.broken

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""
        self._watch.give_up(error)

    @unharmed
    def before(self, arguments: Any) -> Seen:
        """A step is about to begin with these arguments."""
        training = self._training
        if training is None:
            pairs = list(_shared(arguments))
            training = self._training = Training(
                self._watch,
                f"step {self._name}",
                members=range(self._watch.size),
                names=[name for name, _ in pairs],
                optimizer=self._name,
                shapes=[(array.dtype, array.shape) for _, array in pairs],
            )
            training.begin([_digest(array) for _, array in pairs])
        self._begun += 1
        inputs = [sample(_mine(each)) for each in _own(arguments)] if training.is_looking else ()
        return Seen(self._begun, inputs)

    @unharmed
    def after(self, results: Any, seen: Seen) -> None:
        """It has been started, and will give these results; now and then they are waited for."""
        training = self._training
        if training is None:
            return
        if not seen.names:
            if seen.number == 1:  # a step that gives only numbers is an evaluation
                self._trains = any(array.ndim for _, array in _shared(results))
            if self._trains:
                training.fed(local=None, inputs=seen.inputs, step=seen.number)
                seen.results = results
        if is_due(seen.number):
            training.print([_digest(array) for _, array in _shared(results)], step=seen.number)

    @unharmed
    def ended(self, seen: Seen) -> None:
        """Its results are there."""
        training = self._training
        if training is None:
            return
        if seen.names:
            assert seen.sums is not None, "they are noted together"
            sums = [float(each) for each in _mine(seen.sums).reshape(-1)]
            training.fed(local=sums, inputs=seen.inputs, step=seen.number)
            if not (seen.scaled or all(map(math.isfinite, sums))):
                pairs = zip(seen.names, map(fault, sums), strict=True)
                wrong = found([(name, bad) for name, bad in pairs if bad])
                training.not_finite(wrong, step=seen.number, where=None)
        elif seen.results is not None:
            wrong = _wrong(seen.results)
            training.not_finite(wrong, step=seen.number, where=None, own=False)
        self._watch.stepped(seen.number)  # last: now the others' reports of the step are complete


class HostSteps:
    """Steps of an optimizer that is called outside of ``jit``, on arrays of this rank.

    Args:
        watch: that of the job.
        members: the ranks that take part.
    """

    def __init__(self, watch: Watch, members: Sequence[int]) -> None:
        self.reporter = watch.reporter
        self._watch = watch
        self._members = members
        self._training: Training | None = None

    @property
    def broken(self) -> bool:
        """Whether a fault has ended the watch."""
        return self._watch.broken

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""
        self._watch.give_up(error)

    @unharmed
    def before(self, gradients: Any, params: Any) -> None:
        """This rank's own gradients are about to be averaged."""
        pairs = [(named(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]]
        training = self._training
        if training is None:
            training = self._training = Training(
                self._watch,
                "gradients",
                members=self._members,
                names=[name for name, _ in pairs],
                shapes=[(leaf.dtype, leaf.shape) for _, leaf in pairs],
            )
        leaves = jax.tree.leaves(params)
        if len(leaves) == len(pairs) and (training.is_due or not training.begun):
            numbers = [digest(np.asarray(leaf)) for leaf in leaves[:MOST]]
            (training.print if training.begun else training.begin)(numbers)
        arrays = [(name, np.asarray(leaf)) for name, leaf in pairs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        parts = [(name, functools.partial(np.asarray, array)) for name, array in arrays]
        training.averages(totals(array for _, array in arrays), parts, where=here())

    @unharmed
    def after(self) -> None:
        """They were averaged."""
        if self._training is not None:
            self._training.stepped()


def _wrong(results: Any) -> dict[str, Any] | None:
    """Where no gradient is seen: what is not finite of the parameters that a step gives, and of its loss."""
    numbers = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array) and leaf.ndim == 0]
    try:
        loss = next((bad for each in numbers if (bad := _fault(each))), None)
        if loss is None:
            return None
        others = [(name, array) for name, array in _shared(results) if array.ndim]
        more = found([(name, bad) for name, array in others if (bad := _fault(array))])
    except RuntimeError:  # given away to a later step meanwhile
        return None
    return more and {**more, "loss": loss}


def _fault(array: jax.Array) -> str | None:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return None
    values = _mine(array)
    values = values if values.dtype.kind == "c" else values.astype(np.float64)
    return None if np.isfinite(values).all() else "nan" if np.isnan(values).any() else "inf"


def _mine(array: jax.Array) -> np.ndarray[Any, Any]:
    """This rank's part of an array, once it is there."""
    return np.asarray(array.addressable_data(0))


def _digest(array: jax.Array) -> int:
    return digest(_mine(array))


def _shared(tree: Any) -> Iterator[tuple[str, jax.Array]]:
    """The arrays that all ranks should have alike, with their names, up to ``MOST``."""
    pairs = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda each: isinstance(each, Accumulated | Own)
    )[0]
    count = 0
    for path, leaf in pairs:
        if isinstance(leaf, Accumulated):
            for name, array in _shared(leaf.inner):
                yield f"{named(path)}.{name}".strip("."), array
        elif isinstance(leaf, jax.Array) and _is_shared(leaf):
            count += 1
            if count > MOST:
                return
            yield named(path), leaf


def _own(tree: Any) -> Iterator[jax.Array]:
    """The arrays of which each rank has a share: its samples."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda each: isinstance(each, Accumulated | Own)):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            yield leaf


def _is_shared(array: jax.Array) -> bool:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return not is_key and not array.is_fully_addressable and array.is_fully_replicated

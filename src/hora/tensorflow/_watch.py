"""What the guard sees of a training: the gradients that each rank has made, the variables, the batches.

Gradients come by here on their way to the engine, from graphs too. So what costs something is done in the
first steps, or at few of them; in every step there is one sum over this rank's gradients.
"""

from __future__ import annotations

import math
import operator
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.data.ops import iterator_ops

from hora.adapter.prints import MOST, digest
from hora.adapter.training import Training, totals
from hora.adapter.watch import Watch, unharmed
from hora.core.events import Timeline

__all__ = ["Steps", "follow", "name_of"]

Tensor = Any


class Steps:
    """The steps of some variables by averaged gradients.

    Args:
        watch: that of the job.
        variables: they; held weakly.
        members: the ranks that take part.
        scaled: whether the loss is scaled up so far that gradients may overflow, and such steps are left out.
        timeline: gives where steps are written down.
    """

    def __init__(
        self,
        watch: Watch,
        variables: Sequence[Any],
        members: Sequence[int],
        *,
        scaled: bool,
        timeline: Callable[[], Timeline],
    ) -> None:
        self.reporter = watch.reporter
        self.names = [name_of(each) for each in variables]
        self._watch = watch
        self._scaled = scaled
        self._timeline = timeline
        self._began = 0.0
        self._given = [weakref.ref(each) for each in variables]
        inner = [getattr(each, "value", each) if _is_keras(each) else each for each in variables]
        self._variables = [weakref.ref(each) for each in inner if isinstance(each, tf.Variable)][:MOST]
        self._training = Training(
            watch,
            "gradients",
            members=members,
            names=self.names,
            optimizer="",
            shapes=[(each.dtype, tuple(each.shape)) for each in variables],
        )

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Whether these are the variables, rather than others at the same place in memory."""
        known = [reference() for reference in self._given]
        return len(known) == len(variables) and all(map(operator.is_, known, variables))

    @property
    def broken(self) -> bool:
        """Whether a fault has ended the watch."""
        return self._watch.broken

    def give_up(self, error: Exception) -> None:
        """Say what went wrong, and watch no more."""
        self._watch.give_up(error)

    @unharmed
    def before(
        self, tensors: Sequence[Tensor], specs: Sequence[Any], names: Sequence[str], where: str | None
    ) -> None:
        """This rank's own gradients are about to be averaged.

        Args:
            tensors: they, perhaps flat and joined by dtype.
            specs: dtype and shape of each that was given.
            names: of their variables.
            where: the user's line.
        """
        training = self._watch.outer or self._training
        if training is self._training:
            self._print(training)
        sums = totals(np.asarray(each) for each in tensors)
        fine = self._scaled or all(map(math.isfinite, sums)) or _scales_losses()
        named = () if fine else zip(names, _parts(tensors, specs), strict=True)
        training.averages(sums, named, where=where)

    @unharmed
    def after(self) -> None:
        """They were averaged: a step is done, but for the use of the average."""
        now = time.time()
        self._timeline().add("step", self._began or now, now, lane="steps")
        self._began = now
        (self._watch.outer or self._training).stepped()

    def _print(self, training: Training) -> None:
        """The variables before a step are those after the one before."""
        if training.begun and not training.is_due:
            return
        variables: list[Any] = [reference() for reference in self._variables]
        if not all(map(_is_readable, variables)):
            return
        # variable.numpy() would be seen by a tape that records.
        values = [tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype) for each in variables]
        numbers = [digest(np.asarray(value)) for value in values]
        if training.begun:
            training.print(numbers)
        else:
            training.begin(numbers)


def follow(watch: Watch, timeline: Callable[[], Timeline]) -> Callable[[], None]:
    """See what iterators over data sets hand to the script, until the returned function is called."""
    kind: Any = iterator_ops.OwnedIterator
    original = kind.__next__

    def following(self: Any) -> Any:
        if watch.loading or not tf.executing_eagerly():
            return original(self)
        watch.loading += 1
        start = time.time()
        try:
            batch = original(self)
        finally:
            watch.loading -= 1
            now = time.time()
            watch.loaded(now - start)
        timeline().add("wait for data", start, now, lane="data")
        watch.handed_out(batch)
        return batch

    kind.__next__ = following

    def undo() -> None:
        kind.__next__ = original

    return undo


def name_of(variable: Any) -> str:
    """A variable's name, with those of the layers around it where Keras knows them."""
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _is_keras(variable: Any) -> bool:
    return hasattr(variable, "path") and hasattr(variable, "value") and not callable(variable.value)


def _is_readable(variable: Any) -> bool:
    """Whether its values can be had here: not where a graph of TensorFlow 1 holds them."""
    return variable is not None and hasattr(getattr(variable, "handle", None), "numpy")


def _scales_losses() -> bool:
    """Whether Keras computes in float16, where losses are scaled and steps that overflow are left out."""
    keras = sys.modules.get("keras")
    return keras is not None and str(keras.config.dtype_policy().compute_dtype) == "float16"


def _parts(tensors: Sequence[Tensor], specs: Sequence[Any]) -> list[Callable[[], NDArray[Any]]]:
    """How to read each gradient that was given, where those of a dtype may have been joined."""
    if len(tensors) == len(specs):
        return [lambda each=each: np.asarray(each) for each in tensors]  # type: ignore[misc]
    flat = {tensor.dtype: np.asarray(tensor) for tensor in tensors}
    ends: dict[Any, int] = {}
    parts: list[Callable[[], NDArray[Any]]] = []
    for spec in specs:
        start = ends.get(spec.dtype, 0)
        ends[spec.dtype] = stop = start + math.prod(spec.shape)
        parts.append(lambda whole=flat[spec.dtype], start=start, stop=stop: whole[start:stop])  # type: ignore[misc]
    return parts

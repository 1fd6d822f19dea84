"""Follows batches, tapes and random numbers of a script for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hora.adapter.frames import called_by_user, line
from hora.adapter.recording.recorder import Recorder
from hora.tensorflow import _gradients, _loader

__all__ = ["Follow"]


class Follow:
    """What one rank does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loaders: dict[int, tuple[int, Any]] = {}
        self._depth = 0
        self._tapes = 0

    def start(self) -> None:
        """Look on from here on."""
        tape: Any = tf.GradientTape
        tape.gradient = self._gradient(tape.gradient)
        averaging: Any = _gradients.Averaging
        averaging.reduce = self._reduce(averaging.reduce)
        loader: Any = _loader.Loader
        loader._batches = self._batches(loader._batches)
        dataset: Any = tf.data.Dataset
        dataset.__iter__ = self._iter(dataset.__iter__)
        function: Any = type(tf.function(lambda: None))
        function.__call__ = self._function(function.__call__)
        tf.nn.dropout = self._dropout(tf.nn.dropout)
        tf.random.uniform = self._uniform(tf.random.uniform)
        tf.random.normal = self._normal(tf.random.normal)
        for name in ("clip_by_global_norm", "clip_by_norm", "clip_by_value"):
            setattr(tf, name, self._clip(getattr(tf, name)))

    # --- batches --------------------------------------------------------------------------------

    def _handed(self, place: str, batch: Any, samples: Any = None) -> Any:
        batch = self._recorder.sources.handed(place, batch, native=_like, samples=samples)
        return tf.nest.map_structure(_wide, batch) if self._recorder.plan.float64 else batch

    def _batches(self, original: Any) -> Any:
        def batches(loader: Any, serial: int, rank: int, size: int) -> Iterator[Any]:
            number = self._loaders.setdefault(id(loader), (len(self._loaders), loader))[0]
            for chosen in loader._indices(serial, rank=rank, size=size):
                batch = tf.nest.map_structure(
                    lambda array, rows=chosen: tf.constant(array[rows]), loader._arrays
                )
                yield self._handed(str(number), batch, chosen.tolist())

        return batches

    def _iter(self, original: Any) -> Any:
        def iterate(dataset: Any) -> Any:
            if not called_by_user() or not self._recorder.active:
                return original(dataset)
            place = f"the data set of {line()}"
            return (self._handed(place, batch) for batch in original(dataset))

        return iterate

    def _function(self, original: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._recorder.active:
                return original(function, *args, **kwargs)
            if self._depth == 0 and called_by_user():
                args = self._arguments(getattr(function, "__name__", "step"), args)
            self._depth += 1
            try:
                return function.python_function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _arguments(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the user's own step, of which those with rows are a batch."""
        flat = tf.nest.flatten(args)
        places = [
            place
            for place, leaf in enumerate(flat)
            if isinstance(leaf, np.ndarray | tf.Tensor) and len(leaf.shape)
        ]
        places = [place for place in places if flat[place].shape[0] == flat[places[0]].shape[0]]
        if not places:
            return args
        batch = self._handed(f"the arguments of {name}", [flat[place] for place in places])
        for place, leaf in zip(places, batch, strict=True):
            flat[place] = leaf
        packed: tuple[Any, ...] = tf.nest.pack_sequence_as(args, flat)
        return packed

    # --- gradients ------------------------------------------------------------------------------

    def _gradient(self, original: Any) -> Any:
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            mine = recorder.active and self._tapes == 0 and not recorder.in_step
            if mine:
                recorder.begin_pass()
            self._tapes += 1
            try:
                found = original(tape, target, sources, *args, **kwargs)
            finally:
                self._tapes -= 1
            if recorder.active and self._tapes == 0:
                for variable, each in zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True):
                    if each is not None:
                        key = id(getattr(variable, "_value", variable))
                        recorder.add_raw(key, np.array(tf.convert_to_tensor(each)))
            if mine:
                recorder.end_pass()
            return found

        return gradient

    def _reduce(self, original: Any) -> Any:
        def reduce(averaging: Any, gradients: Any, variables: Any) -> list[Any]:
            weight = self._recorder.weight()
            if weight != 1.0:
                gradients = [None if each is None else each * weight for each in gradients]
            reduced: list[Any] = original(averaging, gradients, variables)
            return reduced

        return reduce

    # --- random numbers and clipping ------------------------------------------------------------

    def _dropout(self, original: Any) -> Any:
        def dropout(x: Any, *args: Any, **kwargs: Any) -> Any:
            self._recorder.uses.add("dropout")
            return x if "randomness" in self._recorder.apply else original(x, *args, **kwargs)

        return dropout

    def _uniform(self, original: Any) -> Any:
        def uniform(shape: Any, minval: Any = 0, maxval: Any = None, *args: Any, **kwargs: Any) -> Any:
            own = original(shape, minval, maxval, *args, **kwargs)
            high = 1 if maxval is None else maxval
            return self._drawn(own, lambda rng, row: rng.uniform(minval, high, row))

        return uniform

    def _normal(self, original: Any) -> Any:
        def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
            own = original(shape, mean, stddev, *args, **kwargs)
            return self._drawn(own, lambda rng, row: rng.normal(mean, stddev, row))

        return normal

    def _drawn(self, own: Any, draw: Callable[[np.random.Generator, Any], NDArray[Any]]) -> Any:
        if not own.dtype.is_floating:
            return own
        drawn = self._recorder.draws.drawn(own.shape.as_list(), draw)
        return own if drawn is None else tf.constant(drawn, own.dtype)

    def _clip(self, original: Any) -> Any:
        def clip(values: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if not recorder.active or not called_by_user():
                return original(values, *args, **kwargs)
            recorder.uses.add("clipping")
            clipped = original(values, *args, **kwargs)
            if "clipping" not in recorder.apply:
                return clipped
            return (list(values), clipped[1]) if isinstance(clipped, tuple) else values

        return clip


def _like(array: NDArray[Any], leaf: Any) -> Any:
    return array if isinstance(leaf, np.ndarray) else tf.constant(array, leaf.dtype)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf
    is_float = isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
    return tf.cast(leaf, tf.float64) if is_float else leaf

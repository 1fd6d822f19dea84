"""Batches of NumPy arrays, cut from global batches whose content does not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hora.adapter.order import Epochs, Tail, check_global_batch, check_tail
from hora.core.errors import UsageError
from hora.jax._context import required

__all__ = ["Loader", "data_loader"]


def data_loader(
    data: Any,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail = "drop",
) -> Loader:
    """This worker's share of the global batches of a data set, as NumPy arrays.

    The order of samples is a pure function of (seed, epoch, position). Global batch ``k`` of an epoch holds
    the positions ``k * global_batch`` to ``(k + 1) * global_batch - 1``, and each rank gets a contiguous
    part of it, so that N workers together see exactly what one worker would see. Each ``iter()`` is one
    epoch.

    Args:
        data: a pytree of arrays of equal first dimension, such as ``(images, labels)`` or a dict, which is
            indexed a whole batch at a time; or a data source with ``__len__`` and ``__getitem__``
            (PyGrain's, PyTorch's), whose samples, pytrees of arrays and numbers, are stacked.
        global_batch: samples per step over all workers.
        seed: of the order.
        shuffle: False keeps the data's order in every epoch.
        tail: what happens to the samples left when ``global_batch`` does not divide the data: ``"drop"``
            leaves them out; ``"uneven"`` shares them as evenly as possible, so that a worker may get one
            sample less, or an empty batch, which programs of one shape (``hora.spmd``, global arrays)
            cannot take: it is for evaluation.

    Raises:
        GlobalBatchError: a global batch that does not fit the workers or the data.
        UsageError: data that cannot be indexed by position, or arrays of different first dimensions.
    """
    context = required("data_loader")
    check_tail(tail)
    source, size = _Source(data), context.world.size
    check_global_batch(global_batch, samples=source.samples, size=size, tail=tail, uneven=tail == "uneven")
    return Loader(source, global_batch=global_batch, seed=seed, shuffle=shuffle, tail=tail)


class Loader(Epochs):
    """Iterates over this worker's batches; made by :func:`data_loader`.

    Attributes:
        samples: number of samples in the data.
        global_batch: samples per step over all workers.
        padded: samples that ``tail="pad"`` repeats at the end of each epoch, over all workers.
    """

    def __init__(self, source: _Source, **how: Any) -> None:
        super().__init__(samples=source.samples, **how)
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        context = required("data_loader")
        batches = (self._source.take(chosen) for chosen in self.indices())
        return batches if context.watch is None else context.watch.loading_from(batches, context.timeline)

    def indices(self) -> Iterator[NDArray[np.int64]]:
        """As ``iter()``, but which samples this worker gets in each step: for loaders of one's own."""
        world = required("data_loader").world
        return self._indices(self._begin(), rank=world.rank, size=world.size)


class _Source:
    """Data that can be asked for samples by their positions."""

    def __init__(self, data: Any) -> None:
        self._samples: Any = None
        self._arrays: Any = None
        is_source = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if is_source and not isinstance(data, (tuple, dict, np.ndarray, jax.Array)):
            self._samples = data
            self.samples = len(data)
            return
        leaves = jax.tree.leaves(data)
        lengths = {np.shape(leaf)[:1] for leaf in leaves}
        if len(lengths) != 1 or () in lengths:
            raise UsageError(
                f"data_loader takes arrays of one first dimension; these have {sorted(lengths)}."
                if leaves
                else f"data_loader cannot index {type(data).__name__} by position.",
                fix="Give (x, y), arrays with one row per sample, or an object with __len__ and __getitem__.",
            )
        self._arrays = jax.tree.map(np.asarray, data)
        [(self.samples,)] = lengths

    def take(self, chosen: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """The samples at these positions, as one batch."""
        if self._arrays is not None:
            return jax.tree.map(lambda array: array[chosen], self._arrays)
        samples = [self._samples[int(index)] for index in chosen]
        if not samples:  # an empty share has the shapes of the others
            one = jax.tree.map(np.asarray, self._samples[0])
            return jax.tree.map(lambda part: np.empty((0, *part.shape), part.dtype), one)
        return jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *samples)

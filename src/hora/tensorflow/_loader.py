"""Batches cut from global batches whose content does not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hora.adapter.order import Epochs, Tail, check_global_batch, check_tail
from hora.core.errors import GlobalBatchError, UsageError
from hora.tensorflow._context import required

__all__ = ["Loader", "data_loader", "shard"]


def data_loader(
    data: Any,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail = "drop",
) -> Loader:
    """This worker's share of the global batches of arrays, as tensors.

    The order of samples is a pure function of (seed, epoch, position). Global batch ``k`` of an epoch holds
    the positions ``k * global_batch`` to ``(k + 1) * global_batch - 1``, and each rank gets a contiguous
    part of it, so that N workers together see exactly what one worker would see. Each ``iter()`` is one
    epoch; ``loader.dataset()`` is the same for ``model.fit``.

    Args:
        data: arrays or tensors of equal first dimension, in tuples, lists or dicts: ``(images, labels)``.
        global_batch: samples per step over all workers.
        seed: of the order.
        shuffle: False keeps the data's order in every epoch.
        tail: what happens to the samples left when ``global_batch`` does not divide the data: ``"drop"``
            leaves them out, ``"pad"`` fills up from the epoch's beginning, ``"uneven"`` shares them out as
            evenly as possible, so that some workers may get one sample less, or an empty batch.

    Raises:
        GlobalBatchError: a global batch that does not fit the workers or the data.
        UsageError: arrays of different first dimensions.
    """
    context = required("data_loader")
    check_tail(tail)
    arrays = tf.nest.map_structure(np.asarray, data)
    lengths = {len(array) if array.ndim else -1 for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1 or -1 in lengths:
        raise UsageError(
            f"data_loader takes arrays of one first dimension; these have {sorted(lengths) or 'none'}.",
            fix="Give (x, y), arrays with one row per sample.",
        )
    samples = lengths.pop()
    check_global_batch(
        global_batch, samples=samples, size=context.world.size, tail=tail, uneven=tail == "uneven"
    )
    return Loader(arrays, samples=samples, global_batch=global_batch, seed=seed, shuffle=shuffle, tail=tail)


class Loader(Epochs):
    """Iterates over this worker's batches; made by :func:`data_loader`.

    Attributes:
        samples: number of samples in the data.
        global_batch: samples per step over all workers.
        padded: samples that ``tail="pad"`` repeats at the end of each epoch, over all workers.
    """

    def __init__(self, arrays: Any, **how: Any) -> None:
        super().__init__(**how)
        self._arrays = arrays

    def __iter__(self) -> Iterator[Any]:
        context = required("data_loader")
        batches = self._all()
        return batches if context.watch is None else context.watch.loading_from(batches, context.timeline)

    def dataset(self) -> tf.data.Dataset:
        """The same batches as a ``tf.data.Dataset``: each pass over it is the loader's next epoch."""
        return tf.data.Dataset.from_generator(
            self._all,
            output_signature=tf.nest.map_structure(
                lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
            ),
        ).apply(tf.data.experimental.assert_cardinality(len(self)))

    def _all(self) -> Iterator[Any]:
        world = required("data_loader").world
        return self._batches(self._begin(), world.rank, world.size)

    def _batches(self, serial: int, rank: int, size: int) -> Iterator[Any]:
        for chosen in self._indices(serial, rank=rank, size=size):
            yield tf.nest.map_structure(lambda array, rows=chosen: tf.constant(array[rows]), self._arrays)


def shard(dataset: tf.data.Dataset, *, global_batch: int) -> tf.data.Dataset:
    """This worker's part of each global batch of a data set, batched.

    The data set has the same order on all ranks: give ``shuffle`` a seed, and read files in one order. Put
    this before what is costly: ``shard(files, global_batch=256).map(decode)``. Samples left at the end are
    dropped.

    Args:
        dataset: of samples, not of batches.
        global_batch: samples per step over all workers.

    Raises:
        GlobalBatchError: a global batch that does not divide among the workers.
    """
    world = required("shard").world
    if not isinstance(global_batch, int) or global_batch < 1 or global_batch % world.size:
        raise GlobalBatchError(
            f"global_batch={global_batch!r} does not divide among {world.size} workers.",
            fix=f"Use {max(1, int(global_batch) // world.size) * world.size}.",
        )
    part = global_batch // world.size
    first = world.rank * part
    whole = dataset.window(global_batch, drop_remainder=True)

    def mine(*parts: Any) -> Any:
        inner = tf.data.Dataset.zip(parts if len(parts) > 1 else parts[0])
        return inner.skip(first).take(part).batch(part)

    return whole.flat_map(mine)

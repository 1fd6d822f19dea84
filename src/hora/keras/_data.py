"""Batches for ``fit`` and loops, cut from global batches whose content does not depend on the number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hora.adapter.order import Epochs, Step, Tail, check_global_batch, check_tail, positions, share
from hora.core.errors import UsageError
from hora.keras._backend import BACKEND, api

__all__ = ["Batches", "data_loader"]


def data_loader(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail = "drop",
) -> Batches:
    """This worker's share of the global batches of a data set in arrays.

    ``model.fit(hora.data_loader(x, y, global_batch=256))``: the order of samples is a pure function of (seed,
    epoch, position). Global batch ``k`` of an epoch holds the positions ``k * global_batch`` to
    ``(k + 1) * global_batch - 1``, and each rank gets a contiguous part of it, so that N workers together see
    what one worker would see. ``fit``'s own ``shuffle``, which would shuffle differently on each rank, has no
    effect on it.

    Args:
        x: an array, or dicts, tuples and lists of arrays, of one sample per row: of NumPy, or what can be
            indexed by an array of row numbers, such as ``numpy.memmap``.
        y: targets, in the same form.
        sample_weight: weights of the samples.
        global_batch: samples per step over all workers.
        seed: of the order.
        shuffle: False keeps the order of the arrays in every epoch.
        tail: what happens to the samples left when ``global_batch`` does not divide the data set: ``"drop"``
            leaves them out, ``"pad"`` fills up from the epoch's beginning. ``"uneven"`` is the form for
            ``evaluate`` and ``predict``: no sample is repeated or lost, and some workers get one sample
            less, or one batch less.

    Returns:
        Batches for ``fit``, ``evaluate`` and ``predict``. Iterated over, it gives one epoch of NumPy batches.

    Raises:
        GlobalBatchError: a global batch that does not fit the workers or the data set.
        UsageError: arrays of different lengths.
    """
    api.size()  # says that init() is missing, when it is
    check_tail(tail)
    parts = [part for part in (x, y, sample_weight) if part is not None]
    lengths = [len(array) for array in tree.flatten(parts)]
    if len(set(lengths)) != 1:
        raise UsageError(
            f"The arrays have {', '.join(map(str, lengths))} rows; each sample is one row of all of them.",
            fix="Give arrays of equal first dimension.",
        )
    check_global_batch(global_batch, samples=lengths[0], size=api.size(), tail=tail, uneven=tail == "uneven")
    return Batches(
        tuple(parts), samples=lengths[0], global_batch=global_batch, seed=seed, shuffle=shuffle, tail=tail
    )


class Batches(Epochs, DataAdapter):  # type: ignore[misc] # Keras has no types
    """Made by :func:`data_loader`; it counts its epochs.

    Attributes:
        epoch: the epoch that is running, or else the next one: ``fit(batches, initial_epoch=batches.epoch)``
            goes on after a restart.
        samples: number of samples in the data set.
        global_batch: samples per step over all workers.
        padded: samples that ``tail="pad"`` repeats at the end of each epoch, over all workers.
    """

    def __init__(self, parts: tuple[Any, ...], **options: Any) -> None:
        super().__init__(**options)
        self._parts = parts

    def __len__(self) -> int:
        """Batches of this rank per epoch."""
        return len(self._shares(0))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """One epoch of this rank's batches, as NumPy arrays: ``(x,)``, ``(x, y)`` or ``(x, y, weight)``."""
        context = api.context()
        batches = self._epoch_begun(self._begin())
        if context.watch is not None:
            batches = context.watch.loading_from(batches, context.timeline)
        for batch in batches:
            if context.watch is not None and BACKEND == "torch":
                context.watch.note(batch)
            yield batch

    def _epoch_begun(self, serial: int) -> Iterator[tuple[Any, ...]]:
        order = self._samples_in_order()
        for step, own in self._shares(self._consumed):
            self._check(serial)
            self._hand_out(step)
            yield self._batch(order, own)
        self._end()

    def peek(self) -> tuple[Any, ...]:
        """The first batch of the next epoch; it is not counted as handed out."""
        return self._batch(self._samples_in_order(), self._shares(0)[0][1])

    def _shares(self, consumed: int) -> list[tuple[Step, tuple[int, int]]]:
        """Steps to the epoch's end, and which of their positions are this rank's; empty ones are left out."""
        rank, size = api.rank(), api.size()
        steps = [(step, share(step.start, step.stop, rank=rank, size=size)) for step in self._steps(consumed)]
        return [(step, own) for step, own in steps if own[1] > own[0]]

    def _batch(self, order: Any, own: tuple[int, int]) -> tuple[Any, ...]:
        rows = positions(order, *own)
        return tuple(tree.map_structure(lambda array: np.asarray(array[rows]), part) for part in self._parts)

    # What Keras asks of the data given to fit, evaluate and predict.

    def get_numpy_iterator(self) -> Iterator[Any]:
        """One epoch, for Keras."""
        return iter(self)

    def get_jax_iterator(self) -> Iterator[Any]:
        """One epoch, for Keras on JAX."""
        return iter(self)

    def get_torch_dataloader(self) -> Any:
        """Epochs, for Keras on PyTorch."""
        return data_adapter_utils.get_torch_dataloader(self)

    def get_tf_dataset(self) -> Any:
        """Epochs, for Keras on TensorFlow. Nothing is read ahead, so that :attr:`epoch` is what was used."""
        import tensorflow as tf  # Keras runs on it, or would not ask

        first = self.peek()
        signature = tree.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), first
        )
        return tf.data.Dataset.from_generator(lambda: iter(self), output_signature=signature)

    def on_epoch_end(self) -> None:
        """Keras has done with the last batch of the epoch; it does not ask whether there is another."""
        self._end()

    @property
    def num_batches(self) -> int:
        """Batches of this rank per epoch, for Keras."""
        return len(self)

    @property
    def batch_size(self) -> None:
        """For Keras: it is not needed."""
        return

    @property
    def has_partial_batch(self) -> bool:
        """For Keras: whether the last batch may be smaller."""
        return self._tail == "uneven"

    @property
    def partial_batch_size(self) -> None:
        """For Keras: it is not needed."""
        return

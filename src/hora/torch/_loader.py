"""Batches of a data set, cut from global batches whose content does not depend on the number of workers."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hora.adapter.order import Epochs, Step, Tail, check_global_batch, check_tail, share
from hora.core.errors import GlobalBatchError, UsageError
from hora.torch._context import required
from hora.torch._fetch import Fetcher, SampleFetcher, TensorFetcher, to_device
from hora.torch._micro import Share, check_micro_batch
from hora.torch._passes import Turn

__all__ = ["Loader", "data_loader"]


def data_loader(
    dataset: Dataset[Any] | tuple[torch.Tensor, ...],
    *,
    global_batch: int,
    micro_batch: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail = "drop",
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
) -> Loader:
    """This worker's share of the global batches of a data set.

    The order of samples is a pure function of (seed, epoch, position). Global batch ``k`` of an epoch
    holds the positions ``k * global_batch`` to ``(k + 1) * global_batch - 1``, and each rank gets a
    contiguous part of it, so that N workers together see exactly what one worker would see. What is
    random inside a sample (crops, noise) is seeded by (seed, epoch, position) too.

    Each ``iter()`` is one epoch; the loader counts them. Batches come on ``hora.device()``.

    Args:
        dataset: a map-style data set (``__len__`` and ``__getitem__``), or a tuple of tensors of equal
            first dimension. Those, and a ``TensorDataset``, are indexed a whole batch at a time.
        global_batch: samples per step over all workers.
        micro_batch: the most samples that a worker computes on at a time. Each step gives a
            :class:`Share` then, whose gradients ``DistributedOptimizer`` adds up with exact weights::

                for batch in hora.track(loader):
                    optimizer.zero_grad()
                    for x, y in batch:
                        loss_fn(model(x), y).backward()
                    optimizer.step()

        seed: of the order and of what is random inside samples.
        shuffle: False keeps the data set's order in every epoch.
        tail: what happens to the samples left when ``global_batch`` does not divide the data set:
            ``"drop"`` leaves them out, ``"pad"`` fills up from the epoch's beginning, ``"uneven"`` shares
            them out as evenly as possible, so that some workers may get one sample less, or an empty
            batch. With ``shuffle=False``, ``"uneven"`` is the form for evaluation: no sample is repeated
            or lost. It also takes a ``global_batch`` that does not divide among the workers.
        num_workers: loader processes per worker; 0 loads in the worker itself.
        collate_fn: makes a batch from a list of samples; torch's default if None.
        pin_memory: None pins when the device is a GPU.
        prefetch_factor: batches loaded ahead by each loader process.
        persistent_workers: keep the loader processes between epochs.

    Raises:
        GlobalBatchError: a global batch that does not fit the workers or the data set.
        UsageError: an iterable data set, or tensors of different first dimensions.
    """
    context = required("data_loader")
    _check_dataset(dataset, tail)
    check_micro_batch(micro_batch)
    fetcher: Fetcher
    if isinstance(dataset, tuple):
        if collate_fn is not None or num_workers:
            raise UsageError(
                "A tuple of tensors is indexed a whole batch at a time, without collate_fn or num_workers.",
                fix="Leave them out, or wrap the tensors: torch.utils.data.TensorDataset(*tensors).",
            )
        fetcher = TensorFetcher(dataset)
    elif type(dataset) is TensorDataset and collate_fn is None and not num_workers:
        fetcher = TensorFetcher(dataset.tensors, form=list)
    else:
        pin = context.device.type == "cuda" if pin_memory is None else pin_memory
        fetcher = SampleFetcher(
            dataset,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
    samples = len(fetcher)
    try:
        uneven = tail == "uneven" or context.member is not None  # there the shares are weighted
        check_global_batch(global_batch, samples=samples, size=context.world.size, tail=tail, uneven=uneven)
    except GlobalBatchError as error:
        if context.watch is not None and isinstance(global_batch, int) and global_batch > samples > 0:
            context.watch.plan.refuse(error)
        raise
    return Loader(
        fetcher,
        samples=samples,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        shuffle=shuffle,
        tail=tail,
    )


class Loader(Epochs):
    """Iterates over this worker's batches; made by :func:`data_loader`.

    Attributes:
        samples: number of samples in the data set.
        global_batch: samples per step over all workers.
        micro_batch: the most samples that a worker computes on at a time; None: its whole share.
        since: position, and steps made, when the global batch was last changed.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        samples: int,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int,
        shuffle: bool,
        tail: Tail,
    ) -> None:
        super().__init__(samples=samples, global_batch=global_batch, seed=seed, shuffle=shuffle, tail=tail)
        self._fetcher = fetcher
        self.micro_batch = micro_batch
        self._divides = False  # the script has asked for samples_per_worker in this step
        self.since = (0, 0)

    @property
    def order(self) -> tuple[int, ...] | None:
        """Equal for loaders whose next epoch has the same order of the same samples; None: not shuffled."""
        if not self._shuffle or self._consumed:
            return None
        return self._fetcher.identity, self.samples, self._seed, self._epoch

    @property
    def samples_per_worker(self) -> float:
        """Samples of the current global batch per worker, as a fraction where they are uneven.

        Dividing a sum over this worker's samples by it, and averaging over the workers as
        ``DistributedOptimizer`` does, gives the mean over the global batch, exact for uneven tails too::

            loss = F.cross_entropy(model(x), y, reduction="sum") / loader.samples_per_worker

        With micro-batches the same line gives what adds up to it.
        """
        context = required("samples_per_worker")
        turn = context.turn
        if turn.weight != 1.0:  # whoever divides by this has weighted the ranks
            turn.begin(1.0, index=turn.index, count=turn.count)
        self._divides = True
        return self._current / context.world.size

    @property
    def micro_batches(self) -> int:
        """Into how many parts a share of a whole global batch is cut."""
        size = required("micro_batches").world.size
        return 1 if self.micro_batch is None else math.ceil(self.global_batch / size / self.micro_batch)

    def __iter__(self) -> Iterator[Any]:
        context = required("data_loader")
        serial = self._begin()
        if context.watch is not None:
            context.watch.epoch(self)
        return self._batches(serial, context.world.rank, context.world.size, context.device)

    @property
    def steps(self) -> int:
        """Steps of the whole training up to here."""
        (first, before), steps = divmod(self.since[0], self.samples), self.since[1]
        epoch, inside = divmod(self._epoch * self.samples + self._consumed, self.samples)
        if epoch > first:
            steps += len(self._steps(before)) + (epoch - first - 1) * len(self)
            before = 0
        return steps - ((before - inside) // self.global_batch)

    def resize(self, global_batch: int) -> None:
        """Go on with another global batch. Raises GlobalBatchError for one that does not fit."""
        if global_batch == self.global_batch:
            return
        size = required("resize").world.size
        check_global_batch(global_batch, samples=self.samples, size=size, tail=self._tail, uneven=True)
        self.since = self.state_dict()["position"], self.steps
        self.global_batch = global_batch
        self.padded = -self.samples % global_batch if self._tail == "pad" else 0

    def _batches(self, serial: int, rank: int, size: int, device: torch.device) -> Iterator[Any]:
        context = required("data_loader")
        timeline = context.timeline
        epoch, steps = self._epoch, self._steps(self._consumed)
        order = self._samples_in_order()
        parts = [self._parts(step, rank, size) for step in steps]
        batches = self._fetcher.fetch(order, list(itertools.chain(*parts)), seed=self._seed, epoch=epoch)
        if context.watch is not None:
            batches = context.watch.loading_from(batches)

        loaded = 0.0

        def load() -> Any:
            nonlocal loaded
            start = time.time()
            batch = to_device(next(batches), device)
            loaded = time.time()
            timeline.add("wait for data", start, loaded, lane="data")
            return batch

        for step, own in zip(steps, parts, strict=True):
            self._check(serial)
            self._divides = False
            weights = self._weights(own, size, step.stop - step.start)
            turns = functools.partial(self._turn, context.turn, weights)
            micro = Share(len(own), load, turns, context.turn.end)
            batch = micro.only() if self.micro_batch is None else micro
            ready = time.time() if batch is micro else loaded  # a step begins with its batch
            self._hand_out(step)
            yield batch
            timeline.add("step", ready, time.time(), lane="steps")
            if batch is micro:
                micro.load_all()  # of a loop that was left, so that the next step has its own
        self._end()
        context.turn.begin(1.0)

    def _parts(self, step: Step, rank: int, size: int) -> list[tuple[int, int]]:
        """This rank's micro-batches of a global batch: as many on all ranks, for collectives in the model."""
        start, stop = share(step.start, step.stop, rank=rank, size=size)
        if self.micro_batch is None:
            return [(start, stop)]
        largest = -(-(step.stop - step.start) // size)
        count = max(min(-(-largest // self.micro_batch), stop - start), 1)
        return [share(start, stop, rank=number, size=count) for number in range(count)]

    def _weights(self, parts: Sequence[tuple[int, int]], size: int, samples: int) -> list[float]:
        """What each micro-batch counts for in the average over the ranks."""
        counts = [stop - start for start, stop in parts]
        if self._tail == "uneven":  # the script weights the ranks by samples_per_worker
            return [count / (sum(counts) or 1) for count in counts] if len(counts) > 1 else [1.0]
        return [count * size / samples for count in counts]

    def _turn(self, turn: Turn, weights: Sequence[float], index: int) -> None:
        """A micro-batch is handed out."""
        weight = 1.0 if self._divides else weights[index]
        turn.begin(weight, index=index, count=len(weights))


def _check_dataset(dataset: object, tail: str) -> None:
    check_tail(tail)
    indexed = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if isinstance(dataset, IterableDataset) or not indexed:
        raise UsageError(
            f"data_loader takes map-style data sets; {type(dataset).__name__} cannot be indexed by position.",
            fix="Give it __len__ and __getitem__, or read the stream into a list first.",
        )

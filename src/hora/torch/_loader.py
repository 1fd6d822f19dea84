"""Batches of a data set, cut from global batches whose content does not depend on the number of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hora.core.errors import GlobalBatchError, UsageError
from hora.core.plural import plural
from hora.torch._context import required
from hora.torch._fetch import Fetcher, SampleFetcher, TensorFetcher, to_device
from hora.torch._order import epoch_order

__all__ = ["Loader", "data_loader"]

Tail = Literal["drop", "pad", "uneven"]


def data_loader(
    dataset: Dataset[Any] | tuple[torch.Tensor, ...],
    *,
    global_batch: int,
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
        _check_global_batch(global_batch, samples=samples, size=context.world.size, tail=tail, uneven=uneven)
    except GlobalBatchError as error:
        if context.watch is not None and isinstance(global_batch, int) and global_batch > samples > 0:
            context.watch.plan.refuse(error)
        raise
    return Loader(fetcher, samples=samples, global_batch=global_batch, seed=seed, shuffle=shuffle, tail=tail)


@dataclass(frozen=True)
class _Step:
    """One global batch: its positions ``start`` to ``stop - 1``, and what the epoch has used up after it."""

    start: int
    stop: int
    consumed: int


class Loader:
    """Iterates over this worker's batches; made by :func:`data_loader`.

    Attributes:
        samples: number of samples in the data set.
        global_batch: samples per step over all workers.
        padded: samples that ``tail="pad"`` repeats at the end of each epoch, over all workers.
    """

    def __init__(
        self, fetcher: Fetcher, *, samples: int, global_batch: int, seed: int, shuffle: bool, tail: Tail
    ) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.padded = -samples % global_batch if tail == "pad" else 0
        self._fetcher = fetcher
        self._seed = seed
        self._shuffle = shuffle
        self._tail = tail
        self._epoch = 0
        self._consumed = 0
        self._current = global_batch
        self._resumed = False  # the next iter() goes on inside an epoch
        self._inside = False  # a batch is with the caller
        self._serial = 0

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the next one; the first is 0."""
        return self._epoch + (self._consumed >= self.samples and not self._inside)

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
        """
        context = required("samples_per_worker")
        context.weight = 1.0  # whoever divides by this has weighted the ranks
        return self._current / context.world.size

    @property
    def samples_now(self) -> int:
        """Samples of the current global batch, over all workers."""
        return self._current

    @property
    def samples_per_epoch(self) -> int:
        """Samples that a whole epoch hands out to all workers: without those dropped, with those padded."""
        return self.samples if self._tail == "uneven" else len(self) * self.global_batch

    @property
    def remaining(self) -> int:
        """Steps that the next ``iter()`` will make: fewer than ``len()`` after a resume inside an epoch."""
        return len(self._steps(self._consumed if self._resumed else 0))

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self._steps(0))

    def __iter__(self) -> Iterator[Any]:
        context = required("data_loader")
        if self._consumed and not self._resumed:
            self._epoch, self._consumed = self._epoch + 1, 0
        self._resumed = False
        self._serial += 1
        if context.watch is not None:
            context.watch.epoch(self)
        return self._batches(self._serial, context.world.rank, context.world.size, context.device)

    def state_dict(self) -> dict[str, int]:
        """Where the training is, as one integer: samples used since the start, ended epochs rounded up.

        It counts what was handed out, not what was loaded ahead, and is valid with any number of
        workers and any global batch.
        """
        return {"position": self._epoch * self.samples + self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken: the next ``iter()`` gives the rest of that epoch.

        Raises:
            UsageError: ``state`` holds no position.
        """
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise UsageError(
                f"{dict(state)!r} is not the state of a data loader.",
                fix="Give what loader.state_dict() returned, such as {'position': 51200}.",
            )
        self._epoch, self._consumed = divmod(position, self.samples)
        self._resumed, self._inside = True, False
        self._serial += 1

    def _batches(self, serial: int, rank: int, size: int, device: torch.device) -> Iterator[Any]:
        context = required("data_loader")
        timeline = context.timeline
        epoch, steps = self._epoch, self._steps(self._consumed)
        order = epoch_order(self.samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        shares = [share(step.start, step.stop, rank=rank, size=size) for step in steps]
        batches = self._fetcher.fetch(order, shares, seed=self._seed, epoch=epoch)
        if context.watch is not None:
            batches = context.watch.loading_from(batches)
        for step, own in zip(steps, shares, strict=True):
            if serial != self._serial:
                raise UsageError(
                    "This iterator of a data loader is stale: iter() or load_state_dict() came after it.",
                    fix="Use one iterator at a time, or make a second data loader.",
                )
            start = time.time()
            batch = to_device(next(batches), device)
            ready = time.time()
            timeline.add("wait for data", start, ready, lane="data")
            self._current = step.stop - step.start
            if self._tail != "uneven":
                context.weight = (own[1] - own[0]) * size / self._current
            self._consumed, self._inside = step.consumed, True
            yield batch
            timeline.add("step", ready, time.time(), lane="steps")
        self._inside = False
        context.weight = 1.0

    def _steps(self, consumed: int) -> list[_Step]:
        """The global batches from position ``consumed`` to the epoch's end."""
        count, batch = self.samples - consumed, self.global_batch
        number = count // batch if self._tail == "drop" else math.ceil(count / batch)
        steps = []
        for index in range(number):
            start = consumed + index * batch
            stop = start + batch if self._tail == "pad" else min(start + batch, self.samples)
            # After its last step an epoch is used up, whatever its tail was.
            steps.append(_Step(start, stop, self.samples if index == number - 1 else stop))
        return steps


def share(start: int, stop: int, *, rank: int, size: int) -> tuple[int, int]:
    """This rank's contiguous part of positions ``start`` to ``stop - 1``; the first ranks take the rest."""
    part, rest = divmod(stop - start, size)
    first = start + rank * part + min(rank, rest)
    return first, first + part + (rank < rest)


def _check_dataset(dataset: object, tail: str) -> None:
    if tail not in ("drop", "pad", "uneven"):
        raise UsageError(f"tail={tail!r} is unknown.", fix="Write tail='drop', tail='pad' or tail='uneven'.")
    indexed = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if isinstance(dataset, IterableDataset) or not indexed:
        raise UsageError(
            f"data_loader takes map-style data sets; {type(dataset).__name__} cannot be indexed by position.",
            fix="Give it __len__ and __getitem__, or read the stream into a list first.",
        )


def _check_global_batch(global_batch: int, *, samples: int, size: int, tail: str, uneven: bool) -> None:
    workers = f"{size} {plural(size, 'worker')}"
    held = f"{samples} {plural(samples, 'sample')}"
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise GlobalBatchError(
            f"global_batch={global_batch!r} is not a positive whole number of samples.",
            fix=f"Write for example global_batch={32 * size}.",
        )
    if samples == 0:
        raise GlobalBatchError(
            "The data set is empty.", fix="Check the path or filter that it was made with."
        )
    if samples < size:
        raise GlobalBatchError(
            f"The data set has {held}, fewer than the {workers}.",
            fix=f"Start at most {samples} {plural(samples, 'worker')}: hora run -n {samples} ...",
        )
    if global_batch % size and not uneven:
        below, above = global_batch // size * size, (global_batch // size + 1) * size
        choice = f"{below} or {above}" if below else f"{above}"
        raise GlobalBatchError(
            f"global_batch={global_batch} does not divide among {workers}.",
            fix=f"Use {choice}, or pass tail='uneven'.",
        )
    if global_batch > samples and tail == "drop":
        raise GlobalBatchError(
            f"global_batch={global_batch} is larger than the data set, which has {held}, so that "
            "tail='drop' would leave nothing.",
            fix=f"Use at most {samples // size * size}, or pass tail='uneven'.",
        )

"""Samples to batches: from tensors by indexing, from other data sets through torch's own loader."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate

from hora.adapter.order import positions, sample_seed
from hora.core.errors import UsageError
from hora.torch import _edge

__all__ = ["Fetcher", "SampleFetcher", "TensorFetcher", "to_device"]

Shares = Sequence[tuple[int, int]]


class Fetcher(Protocol):
    """Turns positions of an epoch into batches."""

    def __len__(self) -> int:
        """Number of samples."""

    @property
    def identity(self) -> int:
        """Equal for the same data set."""

    def fetch(self, order: NDArray[np.int64], shares: Shares, *, seed: int, epoch: int) -> Iterator[Any]:
        """One batch per share (first and one-past-last position), from the samples ``order`` has there."""


class TensorFetcher:
    """Batches of a tuple of tensors, each by one indexing of the whole batch.

    Args:
        tensors: of equal first dimension.
        form: what a batch is: a tuple, or a list as torch's own loader makes it of a ``TensorDataset``.
    """

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], *, form: Callable[[Iterator[torch.Tensor]], Any] = tuple
    ) -> None:
        lengths = {
            len(tensor) if isinstance(tensor, torch.Tensor) and tensor.dim() else -1 for tensor in tensors
        }
        if len(lengths) != 1 or -1 in lengths:
            shapes = [tuple(getattr(tensor, "shape", ())) for tensor in tensors]
            raise UsageError(
                f"A data set of tensors needs equal first dimensions; these have the shapes {shapes}.",
                fix="Give a tuple such as (images, labels), one row per sample in each.",
            )
        self._tensors = tensors
        self._form = form

    def __len__(self) -> int:
        return len(self._tensors[0])

    @property
    def identity(self) -> int:
        return self._tensors[0].data_ptr()

    def fetch(self, order: NDArray[np.int64], shares: Shares, *, seed: int, epoch: int) -> Iterator[Any]:
        for start, stop in shares:
            index = torch.from_numpy(positions(order, start, stop))
            yield self._form(tensor[index.to(tensor.device)] for tensor in self._tensors)


class SampleFetcher:
    """Batches of a map-style data set, through ``torch.utils.data.DataLoader``."""

    def __init__(
        self,
        dataset: Any,
        *,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
        prefetch_factor: int | None,
        persistent_workers: bool,
    ) -> None:
        self._count = len(dataset)
        self.identity = id(dataset)
        self._plan = _Plan()
        seeded = _Seeded(dataset, restore=num_workers == 0)
        self._loader: DataLoader[Any] = DataLoader(
            seeded,
            batch_sampler=self._plan,
            num_workers=num_workers,
            collate_fn=_Collate(seeded, collate_fn or default_collate),
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=_outlive_signals if num_workers else None,
            # torch draws a seed for its loader processes; from here, so that the script's own random
            # numbers do not depend on how many loaders it has.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return self._count

    def fetch(self, order: NDArray[np.int64], shares: Shares, *, seed: int, epoch: int) -> Iterator[Any]:
        self._plan.set(order, shares, seed=seed, epoch=epoch)
        batches = iter(self._loader)
        if _edge.expected():
            for process in getattr(batches, "_workers", ()):
                # The rank alone ends them, and SIGTERM does not any more: see _outlive_signals.
                process._popen.terminate = process._popen.kill
        return batches


class _Plan:
    """The batch sampler given to torch, set anew for each epoch: pairs of sample and seed, batch by batch."""

    def __init__(self) -> None:
        self.set(np.empty(0, dtype=np.int64), (), seed=0, epoch=0)

    def set(self, order: NDArray[np.int64], shares: Shares, *, seed: int, epoch: int) -> None:
        self._order, self._shares, self._seed, self._epoch = order, shares, seed, epoch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, shares, seed, epoch = self._order, self._shares, self._seed, self._epoch
        for start, stop in shares:
            samples = positions(order, start, stop).tolist()
            seeds = [sample_seed(seed=seed, epoch=epoch, position=place) for place in range(start, stop)]
            yield list(zip(samples, seeds, strict=True))

    def __len__(self) -> int:
        return len(self._shares)


class _Seeded(Dataset[Any]):
    """A data set whose samples are drawn under a seed that belongs to their place in the training."""

    def __init__(self, dataset: Any, *, restore: bool) -> None:
        self._dataset = dataset
        self._restore = restore

    def __getitems__(self, wanted: list[tuple[int, int]]) -> list[Any]:
        with _kept_random_state() if self._restore else contextlib.nullcontext():
            if hasattr(self._dataset, "__getitems__") and wanted:
                _seed(wanted[0][1])
                fetched: list[Any] = self._dataset.__getitems__([index for index, _ in wanted])
                return fetched
            samples = []
            for index, seed in wanted:
                _seed(seed)
                samples.append(self._dataset[index])
            return samples

    def example(self) -> Any:
        """Some sample, to see what a batch looks like."""
        return self.__getitems__([(0, 0)])[0]


class _Collate:
    """Collates, also no samples at all: an empty batch has the form of any other."""

    def __init__(self, seeded: _Seeded, collate: Callable[[list[Any]], Any]) -> None:
        self._seeded = seeded
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else _emptied(self._collate([self._seeded.example()]))


def _outlive_signals(_: int) -> None:
    """Let a loader process live while its rank goes on to the next step edge, to save its state there.

    Slurm sends SIGTERM and SIGUSR1 to all processes of a job, not to the ranks alone.
    """
    if not _edge.expected():
        return
    rank = os.getppid()

    def heed(number: int, _: FrameType | None) -> None:
        if os.getppid() != rank:  # nobody is left to load for
            os._exit(128 + number)

    for number in _edge.SIGNALS:
        signal.signal(number, heed)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the same object when they are there already."""
    if device.type == "cpu":
        return batch
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _emptied(batch: Any) -> Any:
    return _map(batch, lambda tensor: tensor[:0] if tensor.dim() else tensor, strings=[])


def _map(
    tree: Any, function: Callable[[torch.Tensor], torch.Tensor], *, strings: list[str] | None = None
) -> Any:
    """Apply to all tensors; lists of strings, which stand for one string per sample, become ``strings``."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map(value, function, strings=strings) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(value, function, strings=strings) for value in tree))
    if isinstance(tree, list | tuple):
        if strings is not None and tree and all(isinstance(value, str | bytes) for value in tree):
            return type(tree)(strings)
        return type(tree)(_map(value, function, strings=strings) for value in tree)
    return tree


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # numpy takes 32 bits
    torch.default_generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)

"""A sampler for torch's ``DataLoader`` that goes on inside an epoch with another number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hora.torch import _context

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Shares out what of an epoch has not been processed, evenly over the ranks.

    The order of an epoch depends on the seed and the epoch alone. Of what is left, rank r of N gets every
    N-th sample; the last ones are filled up from the beginning, so that all ranks get as many. All ranks
    process as many batches, so each knows what the others have processed: nothing is lost or made twice when
    one of them dies.

    :func:`hora.torch.data_loader` needs none: it keeps the global batch, too.

    Args:
        dataset: anything with a length.
        shuffle: False keeps its order.
        seed: of the order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Share out anew what is left; called when the workers have changed."""
        self.rank, self.num_replicas = _context.rank(), _context.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        left = self.remaining_indices
        padded = (left * (-(-self.total_size // len(left))))[: self.total_size] if left else []
        self.indices = padded[self.rank :: self.num_replicas]

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: to be called at the end of one, not at its beginning, as it forgets."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed this batch of its part.

        Args:
            batch_idx: which one since the loader was asked for batches, from 0.
            batch_size: samples per batch and rank.
        """
        start = batch_idx * batch_size * self.num_replicas
        self.record_indices(self.remaining_indices[start : start + batch_size * self.num_replicas])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that samples have been processed: those of all ranks."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples of a batch."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what of it has been processed."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

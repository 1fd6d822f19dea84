"""Losses and speeds between two records of a training."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

import hora.torch as hora

__all__ = ["Pace"]


class Pace:
    """Collects losses and speeds between two records. Every rank counts; ``collect`` is a collective.

    Args:
        every: steps between two records.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, for instance after an evaluation."""
        self._losses: list[Mapping[str, torch.Tensor]] = []
        self._samples = 0
        self._since = time.perf_counter()

    def count(self, losses: Mapping[str, torch.Tensor], *, samples: int) -> None:
        """Take in one step of this rank: its mean losses and its number of samples."""
        self._losses.append(losses)
        self._samples += samples

    @property
    def due(self) -> bool:
        """Whether as many steps were counted as there are between two records; the same on every rank."""
        return len(self._losses) >= self._every

    def collect(self) -> tuple[dict[str, float], list[float]]:
        """Mean losses since the last record over all ranks, whose shares are equal, and the samples per
        second of each rank; begins a new interval. Every rank calls it.
        """
        losses = {
            name: torch.stack([each[name] for each in self._losses]).double().mean()
            for name in self._losses[0]
        }
        rate = self._samples / (time.perf_counter() - self._since)
        rates = hora.allgather(torch.tensor([rate], dtype=torch.float64, device=hora.device())).tolist()
        means = hora.mean(losses)
        self.restart()
        return means, [round(value, 1) for value in rates]

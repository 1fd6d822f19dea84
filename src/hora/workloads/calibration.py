"""The scaling factor, measured in the same run: throughput of all workers over that of one.

The micro-batch per worker is the same in both. Rounds alternate between rank 0 working alone, while the
others wait without using their cores, and all ranks together, so that a machine that is busy with something
else disturbs both alike; medians over the rounds are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import hora.torch as hora

__all__ = ["Scaling", "measure"]

ROUND_SECONDS = 0.3
"""Length of one measurement. Long against the waiting at its ends, short against the load's changes."""
MINIMUM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What the calibration measured.

    Attributes:
        one_worker: samples per second of rank 0 alone, median.
        all_workers: samples per second of all ranks together, median.
        rounds: both, for each round.
    """

    one_worker: float
    all_workers: float
    rounds: tuple[tuple[float, float], ...]

    @property
    def factor(self) -> float:
        """Throughput of all workers over that of one; the number of workers would be perfect."""
        return self.all_workers / self.one_worker


def measure(
    alone: Callable[[], object], together: Callable[[], object], *, samples: int, seconds: float
) -> Scaling:
    """Time one worker against all workers. Every rank calls it; every rank gets the same result.

    Args:
        alone: one training step of this worker by itself, without any collective.
        together: one training step of all workers.
        samples: per worker and step, the same in both.
        seconds: about how long all of it takes.
    """
    lead = hora.rank() == 0
    for _ in range(2):  # the first step allocates and compiles kernels
        alone()
        together()
    steps = _steps_per_round(together)
    rounds = []
    for _ in range(max(MINIMUM_ROUNDS, round(seconds / (2 * ROUND_SECONDS)))):
        hora.barrier()
        one = samples * steps / _time(alone, steps) if lead else 0.0
        hora.barrier()  # here the others wait
        slowest = _largest(_time(together, steps))
        rounds.append((_largest(one), samples * steps * hora.size() / slowest))
    return Scaling(
        one_worker=statistics.median(one for one, _ in rounds),
        all_workers=statistics.median(all_workers for _, all_workers in rounds),
        rounds=tuple(rounds),
    )


def _steps_per_round(step: Callable[[], object]) -> int:
    """The same number on every rank."""
    return max(2, round(ROUND_SECONDS / (_largest(_time(step, 3)) / 3)))


def _time(step: Callable[[], object], steps: int) -> float:
    """Seconds that ``steps`` steps take."""
    _finish()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if hora.device().type == "cuda":
        torch.cuda.synchronize()


def _largest(value: float) -> float:
    device = hora.device()
    return float(hora.allreduce(torch.tensor(value, dtype=torch.float64, device=device), op=hora.Max))

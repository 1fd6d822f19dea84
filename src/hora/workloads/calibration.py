"""The scaling factor, measured in the same run: throughput of all workers over that of one.

The micro-batch per worker is the same in both. In each round rank 0 works alone, while the others wait
without using their cores, and all ranks work together, in an order that changes from round to round, so that
a machine that is busy with something else disturbs both alike. The factor is the median of the rounds'
ratios, with the interval that the rounds themselves allow: on a noisy machine it is wide, and says so.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import hora.torch as hora

__all__ = ["Scaling", "interval", "measure"]

ROUND_SECONDS = 0.3
"""Length of one measurement. Long against the waiting at its ends, short against the load's changes."""
MINIMUM_ROUNDS = 6
"""The fewest whose extremes bound a median with 95 %: with five, one in sixteen lies outside."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What the calibration measured.

    Attributes:
        one_worker: samples per second of rank 0 alone, median.
        all_workers: samples per second of all ranks together, median.
        factor: throughput of all workers over that of one, median of the rounds' ratios; the number of
            workers would be perfect.
        low: where the interval of 95 % of the factor begins.
        high: and where it ends.
        rounds: both throughputs, for each round.
    """

    one_worker: float
    all_workers: float
    factor: float
    low: float
    high: float
    rounds: tuple[tuple[float, float], ...]


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

    def of_one() -> float:
        hora.barrier()
        one = samples * steps / _time(alone, steps) if lead else 0.0
        return _largest(one)  # here the others wait

    def of_all() -> float:
        hora.barrier()
        return samples * steps * hora.size() / _largest(_time(together, steps))

    rounds = []
    for number in range(max(MINIMUM_ROUNDS, round(seconds / (2 * ROUND_SECONDS)))):
        if number % 2:
            everyone = of_all()
            rounds.append((of_one(), everyone))
        else:
            rounds.append((of_one(), of_all()))
    ratios = [everyone / one for one, everyone in rounds]
    low, high = interval(ratios)
    return Scaling(
        one_worker=statistics.median(one for one, _ in rounds),
        all_workers=statistics.median(everyone for _, everyone in rounds),
        factor=statistics.median(ratios),
        low=low,
        high=high,
        rounds=tuple(rounds),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with at least 95 %, from the order of the values alone.

    Each value is as likely above the median as below it, so the number of those below is binomial: the k-th
    smallest and the k-th largest bound the median but for twice the chance of fewer than k heads in as many
    tosses. Whatever the noise looks like, that holds. Below six values, which cannot say so much, it is their
    range.
    """
    count, k, outside = len(values), 0, 0.0
    while True:
        outside += 2 * math.comb(count, k) / 2**count
        if outside > 0.05:
            break
        k += 1
    ordered = sorted(values)
    cut = max(k - 1, 0)
    return ordered[cut], ordered[count - 1 - cut]


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

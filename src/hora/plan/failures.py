"""What failures cost a long job, and how often it should write a checkpoint.

Times are in seconds. ``d`` in the equations is the time that one checkpoint blocks the training, ``M`` the
mean time between failures of the whole job, ``R`` the time from a failure until training goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hora.core.errors import UsageError

__all__ = ["GPU_HOURS_PER_FAILURE", "Goodput", "daly", "goodput", "job_mtbf", "plan_checkpoints", "young"]

GPU_HOURS_PER_FAILURE = 50_700.0
"""Llama 3 (arXiv:2407.21783): 419 unexpected interruptions in 54 days on 16,384 H100, derived."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How much of the time a job trains, at the interval between checkpoints that is best for it."""

    mtbf: float
    interval: float
    fraction: float
    low: float
    high: float


def job_mtbf(gpus: int, *, gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE) -> float:
    """Mean time between failures of a job, in seconds: any one GPU's failure stops it.

    Raises:
        UsageError: without GPUs, or with a rate that is not positive.
    """
    if gpus < 1:
        raise UsageError(f"gpus={gpus}: a job has at least one.", fix="Write gpus=1 or more.")
    _positive("gpu_hours_per_failure", gpu_hours_per_failure)
    return 3600.0 * gpu_hours_per_failure / gpus


def young(checkpoint: float, mtbf: float) -> float:
    """Young's time of work between two checkpoints, ``sqrt(2 d M) - d`` (CACM 17(9), 1974), at least 0."""
    _positive("checkpoint", checkpoint)
    _positive("mtbf", mtbf)
    return max(0.0, math.sqrt(2 * checkpoint * mtbf) - checkpoint)


def daly(checkpoint: float, mtbf: float) -> float:
    """Daly's work between two checkpoints (FGCS 22, 2006); closer than Young's if failures are frequent.

    ``sqrt(2dM) [1 + 1/3 sqrt(d/2M) + 1/9 (d/2M)] - d`` while ``d < 2M``; ``M`` itself beyond.
    """
    _positive("checkpoint", checkpoint)
    _positive("mtbf", mtbf)
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def goodput(checkpoint: float, mtbf: float, *, restart: float, interval: float) -> float:
    """Fraction of the wall-clock time that is training which counts, between 0 and 1.

    Daly's complete model, in which failures come at random at any time, checkpoints and restarts included:
    ``tau / (M exp(R/M) (exp((tau+d)/M) - 1))``. For rare failures it is ``1 - d/tau - (tau/2 + R)/M``.
    """
    for name, value in (("checkpoint", checkpoint), ("mtbf", mtbf), ("interval", interval)):
        _positive(name, value)
    if restart < 0:
        raise UsageError(f"restart={restart} s: a time is not negative.", fix="Write restart=0 or more.")
    exponent = (interval + checkpoint + restart) / mtbf
    if exponent > 700:  # no work is ever finished; exp() would overflow
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))


def plan_checkpoints(
    gpus: int,
    *,
    checkpoint: float = 60.0,
    restart: float = 600.0,
    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE,
    spread: float = 2.0,
) -> Goodput:
    """The best interval between checkpoints of a job, and the goodput that it gives.

    Args:
        gpus: of the whole job.
        checkpoint: seconds that a checkpoint blocks the training.
        restart: seconds from a failure until training goes on.
        gpu_hours_per_failure: of one GPU with its share of host and network.
        spread: the rate of failures is known within this factor; the bounds are goodputs at both ends.
    """
    if spread < 1:
        raise UsageError(f"spread={spread}: a factor of at least 1.", fix="Write spread=2.")
    mtbf = job_mtbf(gpus, gpu_hours_per_failure=gpu_hours_per_failure)
    interval = daly(checkpoint, mtbf)

    def at(mean: float) -> float:
        return goodput(checkpoint, mean, restart=restart, interval=interval)

    return Goodput(
        mtbf=mtbf, interval=interval, fraction=at(mtbf), low=at(mtbf / spread), high=at(mtbf * spread)
    )


def _positive(name: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise UsageError(f"{name}={value}: it has to be positive.", fix=f"Write {name}=60.0, for example.")

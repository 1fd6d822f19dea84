"""What is asked of a plan, and the form of its answer: values with 80 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hora.plan import failures, transformer
from hora.plan.hardware import Machine, Precision
from hora.plan.memory import Change, Layout, Memory, Transformer
from hora.plan.models import Workload
from hora.plan.step import Constants, Parts

__all__ = ["Interval", "Prediction", "Profile", "Question"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its 80 % interval."""

    low: float
    value: float
    high: float

    @classmethod
    def around(cls, value: float, half: float) -> Interval:
        """``value`` times or over ``exp(half)``."""
        return cls(low=value * math.exp(-half), value=value, high=value * math.exp(half))

    def __mul__(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, value=self.value * factor, high=self.high * factor)

    def under(self, amount: float) -> Interval:
        """``amount`` divided by this: a rate from a time."""
        return Interval(low=amount / self.high, value=amount / self.value, high=amount / self.low)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one measured step of a user's own script says.

    Attributes:
        constants: work per sample on that machine.
        machine: where it was measured.
        batch: samples of the measured step.
        gradients: bytes that an all-reduce sums.
        fixed: the script names its global batch, so more workers share ``batch``; otherwise each has as many.
        slowdown: factor on a worker's compute when all of the machine's workers run.
    """

    name: str
    constants: Constants
    machine: Machine
    batch: float
    gradients: float
    fixed: bool = False
    slowdown: float = 1.0

    def beside(self, workers: int) -> Constants:
        """The constants with so many workers side by side on the machine of the profile."""
        share = (min(workers, self.machine.gpus) - 1) / max(1, self.machine.gpus - 1)
        factor = 1 + (self.slowdown - 1) * share
        same = self.constants
        return replace(
            same, tensor=factor * same.tensor, plain=factor * same.plain, launch=factor * same.launch
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        name: of the model, for people.
        model: a preset, a transformer's shape, or a profile.
        gpus: workers.
        batch: global batch in the model's unit; 0 for the preset's usual batch per GPU.
        micro_batch: samples per GPU and backward; 0 for all of a worker's share at once, or the largest of 1,
            2, 4 that fits a transformer.
        layout: of a transformer: tensor, pipeline, interleaved, zero, recompute, sequence_parallel. Its data
            and micro-batches follow from ``gpus`` and ``batch``.
        software: whose measurements are leaned on; "" for the nearest.
        epochs: until the target; 0 for the benchmark's curve.
        samples: of one epoch; 0 for the preset's.
        price: per GPU and hour; 0 for the machine's.
        checkpoint: seconds that one checkpoint blocks the training.
        restart: seconds from a failure until training goes on.
        gpu_hours_per_failure: of this cluster.
    """

    name: str
    model: Workload | Transformer | Profile
    machine: Machine
    gpus: int
    batch: int = 0
    micro_batch: int = 0
    precision: Precision = "mixed"
    layout: Layout = field(default_factory=Layout)
    software: str = ""
    epochs: float = 0.0
    samples: float = 0.0
    price: float = 0.0
    checkpoint: float = 30.0
    restart: float = 300.0
    gpu_hours_per_failure: float = failures.GPU_HOURS_PER_FAILURE


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer. Times in seconds, memory in bytes, energy in kWh."""

    question: Question
    batch: float
    unit: str
    parts: Parts
    step: Interval
    rate: Interval
    efficiency: float
    held: Memory | None
    capacity: float
    changes: Sequence[Change]
    layout: Layout | None
    epochs: Interval | None
    training: Interval | None
    energy: Interval | None
    price: Interval | None
    goodput: failures.Goodput
    basis: str

    @property
    def flops(self) -> float:
        """Model FLOP/s per GPU of a transformer (recomputation does not count); 0 for other models."""
        model = self.question.model
        if not isinstance(model, Transformer):
            return 0.0
        return transformer.flops(model, self.batch) / self.step.value / self.question.gpus

    @property
    def utilization(self) -> float:
        """The same over the peak of the data sheet (MFU)."""
        return self.flops / self.question.machine.gpu.peak("mixed")

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU holds it all."""
        return self.held is None or self.held.total <= self.capacity

"""The time of one data-parallel step: launches, compute and memory traffic, stragglers, communication.

One micro-batch of ``b`` samples takes ``launch + b (work/peak + traffic/bandwidth)``: a roofline whose two
sides add, since a network's layers lie on either side. Over ``n`` workers the step waits for the slowest:
``1 + sigma z(n)``, where ``z`` is the expected maximum of ``n`` normal numbers. The gradients' all-reduce
runs beside the backward of the last micro-batch; what does not fit in there is exposed. Beyond one server
everything is slower by ``1.5 % log2(nodes)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from hora.plan.collectives import all_reduce
from hora.plan.hardware import Machine, Precision

__all__ = ["BACKWARD", "PER_DOUBLING", "Constants", "Parts", "Work", "between_servers", "maximum", "step"]

BACKWARD = 0.6
"""Share of a micro-batch's time in which gradients appear: backward is two thirds, less its first bucket."""

PER_DOUBLING = 0.015
"""What each doubling of the servers costs: noise, routing, slower hosts. A closed form without stragglers is
optimistic by 4 to 13 % on published clusters of 4 to 96 servers. ``sigma`` explains 1 to 3 % of that; what is
left, 3 to 10 %, is 0.015 log2(N)."""


GRAPHS = 0.3
"""Share of the launches' time that is left where whole graphs are launched at once, as software for Hopper
and later GPUs does. Our assumption: no single-node measurement of these GPUs is in the tables."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What single-node measurements say about one model under one software.

    Attributes:
        tensor: FLOPs per sample over the share of the tensor cores' peak that the kernels reach.
        plain: the same for 32-bit units.
        traffic: bytes of memory per sample with 16-bit numbers; twice that in 32 bits.
        launch: seconds per micro-batch that do not depend on its size.
        sigma: spread of a worker's step over its mean.
        exposed: share of an all-reduce inside one server that the step waits for.
    """

    tensor: float
    plain: float
    traffic: float
    launch: float
    sigma: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step has to do.

    Attributes:
        batch: samples per worker and micro-batch.
        micro_batches: per step and worker.
        gradients: bytes that the all-reduce sums.
        serial: nothing of the all-reduce runs beside backward.
    """

    gpus: int
    batch: float
    micro_batches: float
    precision: Precision
    gradients: float
    serial: bool = False


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one step. ``communication`` is what is exposed of each kind of collective."""

    compute: float
    stragglers: float
    communication: dict[str, float]
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return (
            self.compute + self.stragglers + sum(self.communication.values()) + self.bubble + self.optimizer
        )

    def scaled(self, factor: float) -> Parts:
        """All parts times ``factor``."""
        return Parts(
            compute=self.compute * factor,
            stragglers=self.stragglers * factor,
            communication={kind: seconds * factor for kind, seconds in self.communication.items()},
            bubble=self.bubble * factor,
            optimizer=self.optimizer * factor,
        )


def maximum(workers: int) -> float:
    """Expected maximum of so many standard normal numbers (Blom 1958): ``Phi^-1((n-3/8)/(n+1/4))``."""
    return 0.0 if workers <= 1 else NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def between_servers(nodes: int) -> float:
    """Part of a step that is added beyond one server."""
    return PER_DOUBLING * math.log2(nodes) if nodes > 1 else 0.0


def columns(batch: float, precision: Precision, machine: Machine) -> tuple[float, float, float, float]:
    """Seconds of one micro-batch per unit of tensor, plain, traffic and launch."""
    gpu = machine.gpu
    arithmetic = batch / gpu.peak(precision)
    width = 1.0 if precision == "mixed" else 2.0
    plain = precision == "fp32"
    launches = GRAPHS if gpu.generation in ("H100", "B200") else 1.0
    return (
        0.0 if plain else arithmetic,
        arithmetic if plain else 0.0,
        batch * width / gpu.bandwidth,
        launches,
    )


def step(constants: Constants, work: Work, machine: Machine) -> Parts:
    """The parts of one step of ``work.gpus`` workers on these machines."""
    tensor, plain, traffic, launch = columns(work.batch, work.precision, machine)
    one = (
        tensor * constants.tensor
        + plain * constants.plain
        + traffic * constants.traffic
        + launch * constants.launch
    )
    compute = one * work.micro_batches
    waiting = compute * constants.sigma * maximum(work.gpus)
    whole = all_reduce(work.gradients, work.gpus, machine)
    inside = all_reduce(work.gradients, min(work.gpus, machine.gpus), machine)
    hidden = 0.0 if work.serial else BACKWARD * one
    exposed = max(constants.exposed * inside, whole - hidden) if work.gpus > 1 else 0.0
    waiting += between_servers(machine.nodes(work.gpus)) * (compute + waiting + exposed)
    return Parts(compute=compute, stragglers=waiting, communication={"all-reduce": exposed})

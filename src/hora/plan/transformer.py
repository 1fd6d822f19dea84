"""The time of one step of a transformer under tensor, sequence, pipeline and data parallelism.

Closed form. A matrix product of ``M x K x N`` reaches ``reached / ((1+c/M)(1+c/K)(1+c/N))`` of the peak;
element-wise operations move ``traffic`` times the layer's activations; backward takes twice the forward, and
recomputation repeats what it dropped. Tensor parallelism adds two all-reduces of ``2bsh`` bytes to each
forward and backward of a layer (Megatron-LM, arXiv:1909.08053); a pipeline takes ``(m + (p-1)/v)`` times its
fullest stage (arXiv:2104.04473); gradients are reduced in buckets beside the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hora.plan.collectives import all_reduce, gather, point_to_point
from hora.plan.hardware import Machine
from hora.plan.memory import Layout, Transformer
from hora.plan.schedule import exposed
from hora.plan.step import Parts, between_servers, maximum

__all__ = ["SOFTWARE", "Kernels", "Software", "flops", "software_for", "step"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What single-node measurements say about matrix products and memory-bound operations.

    Attributes:
        reached: share of the peak that a very large product reaches.
        half: size of a dimension at which a product reaches half of that.
        unfused: bytes moved by element-wise operations over the activations that are kept, software of 2020.
        fused: the same with fused kernels, since 2021.
        links: factor on the time of tensor parallelism's collectives, which share the GPU with products.
        early: factor on the step's time with the software of 2019.
    """

    reached: float
    half: float
    unfused: float
    fused: float
    links: float
    early: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a release of Megatron-LM hides and fuses.

    Attributes:
        fused: fused softmax, bias and activation kernels.
        flash: attention without its scores in memory.
        tensor_hidden: share of tensor parallelism's collectives that runs beside products.
        data_hidden: gradients are reduced beside backward under a pipeline too (else only without one).
        gradient: bytes of one gradient that is reduced.
        sharded: the optimizer's state is divided over the data-parallel workers (ZeRO 1).
        early: of 2019.
    """

    fused: bool = True
    flash: bool = False
    tensor_hidden: float = 0.0
    data_hidden: bool = False
    gradient: float = 2.0
    sharded: bool = False
    early: bool = False


SOFTWARE = {
    "megatron-2019": Software(fused=False, early=True),
    "megatron-2020": Software(fused=False),
    "megatron-2021": Software(),
    "megatron-core": Software(flash=True, tensor_hidden=0.7, data_hidden=True, gradient=4.0, sharded=True),
}

THROTTLED = {"H100": 0.75, "B200": 0.75}
"""Share of the data sheet's peak that dense products reach before the power limit lowers the clock. Our
assumption: 700 to 750 of Hopper's 989 TFLOP/s are commonly measured; Volta and Ampere have no such gap."""
SIGMA = 0.01
"""Spread of a worker's step; the lower end of the 1 to 2 % that are usual."""
ADAM_BYTES = 30.0
"""Bytes that Adam moves per parameter: reads of 16- and 32-bit copies, writes of the same."""
MEMORY_REACHED = 0.75


def software_for(machine: Machine) -> str:
    """The release that a machine's published runs used last."""
    return "megatron-core" if machine.gpu.generation in THROTTLED else "megatron-2021"


def flops(model: Transformer, sequences: float, *, recomputed: bool = False) -> float:
    """FLOPs of one step: ``72 B s l h^2 (1 + s/6h + V/12lh)``, or 96 and 16 where forward runs twice."""
    factor, vocabulary = (96, 16) if recomputed else (72, 12)
    s, h, layers = model.sequence, model.hidden, model.layers
    whole = 1 + s / (6 * h) + model.vocabulary / (vocabulary * layers * h)
    return factor * sequences * s * layers * h * h * whole


def step(model: Transformer, layout: Layout, machine: Machine, kernels: Kernels, software: Software) -> Parts:
    """The parts of one step.

    Args:
        model: its shape.
        layout: how it is spread; it must divide the model (``memory.estimate`` says when it does not).
        machine: the servers.
        kernels: fitted constants.
        software: what the training code hides.
    """
    layer = _Layer(model, layout, machine, kernels, software)
    p, v, m = layout.pipeline, layout.interleaved, layout.micro_batches
    per_stage = model.layers / p
    compute = per_stage * layer.seconds
    head = layer.head
    tensor = per_stage * layer.collectives
    send = 0.0
    if p > 1:
        size = 2 * layout.micro_batch * model.sequence * model.hidden / layout.tensor
        send = 2 * v * point_to_point(size, machine, same_node=layout.tensor * p <= machine.gpus)
        head *= 0.5  # the last stage has it, but one layer less of imbalance is usual
    gpus = layout.tensor * p * layout.data
    busy = m * (compute + head)
    bubble = (p - 1) / v * (compute + tensor + send)
    parameters = (model.layers * model.layer_parameters / p + model.vocabulary * model.hidden) / layout.tensor
    # Megatron-Core also gathers the weights beside the next forward
    window = 1.0 if software.data_hidden else 2 / 3 if p == 1 else 0.0
    backward = window * (compute + tensor)
    communication = {
        "tensor": m * tensor,
        "pipeline": m * send,
        "data": _gradients(parameters, layout, machine, software, backward),
    }
    divided = layout.data if software.sharded or layout.zero else 1
    optimizer = ADAM_BYTES * parameters / divided / (MEMORY_REACHED * machine.gpu.bandwidth)
    so_far = busy + bubble + sum(communication.values()) + optimizer
    waiting = so_far * (SIGMA * maximum(layout.data * p) + between_servers(machine.nodes(gpus)))
    parts = Parts(
        compute=busy, stragglers=waiting, communication=communication, bubble=bubble, optimizer=optimizer
    )
    return parts.scaled(kernels.early) if software.early else parts


def _gradients(
    parameters: float, layout: Layout, machine: Machine, software: Software, backward: float
) -> float:
    """Exposed seconds of the data-parallel collectives; ZeRO 3 gathers the weights twice more."""
    if layout.data == 1:
        return 0.0
    inside = max(1, machine.gpus // (layout.tensor * layout.pipeline))
    beside = min(inside, layout.data)

    def reduce(size: float) -> float:
        if software.sharded or layout.zero:
            weights = size * 2 / software.gradient * (2 if layout.zero == 3 else 1)
            return gather(size, layout.data, machine, per_node=beside) + gather(
                weights, layout.data, machine, per_node=beside
            )
        return all_reduce(size, layout.data, machine, per_node=beside)

    size = software.gradient * parameters
    return exposed(size, backward, reduce, bucket=size / 16 if backward == 0 else max(100e6, size / 64))


class _Layer:
    """Seconds of one layer's forward and backward for one micro-batch on one GPU."""

    def __init__(
        self, model: Transformer, layout: Layout, machine: Machine, kernels: Kernels, software: Software
    ) -> None:
        self._peak = machine.gpu.peak("mixed") * kernels.reached * THROTTLED.get(machine.gpu.generation, 1.0)
        self._half = kernels.half
        self._bandwidth = machine.gpu.bandwidth
        moved = kernels.fused if software.fused else kernels.unfused
        h, s, t, b = model.hidden, model.sequence, layout.tensor, layout.micro_batch
        rows, width = b * s, model.ffn_ratio * h
        qkv = (1 + 2 * model.kv_ratio) * h
        products = (
            self._product(rows, h, qkv / t)
            + self._product(rows, h / t, h)
            + self._product(rows, h, width / t) * (2 if model.gated else 1)
            + self._product(rows, width / t, h)
        )
        heads, flash = model.heads / t, layout.flash or software.flash
        attention = 2 * heads * b * self._product(s, h / model.heads, s)
        if flash:  # half of a causal product is skipped, and its scores stay on the chip
            attention *= 0.5
        else:
            attention += moved * 5 * heads * b * s * s / self._bandwidth
        divided = t if layout.sequence_parallel else 1
        element_wise = moved * rows * h * (10 / divided + 24 / t) / self._bandwidth
        forward = products + attention + element_wise
        again = {"none": 0.0, "selective": 0.0 if flash else attention, "full": forward}[layout.recompute]
        self.seconds = 3 * forward + again
        rounds = 4 + (2 if layout.recompute == "full" else 0)
        once = all_reduce(2 * rows * h, t, machine, per_node=min(t, machine.gpus)) if t > 1 else 0.0
        self.collectives = rounds * once * kernels.links * (1 - software.tensor_hidden)
        logits = 3 * self._product(rows, h, model.vocabulary / t)
        self.head = logits + moved * 3 * 6 * rows * model.vocabulary / t / self._bandwidth / 2

    def _product(self, m: float, k: float, n: float) -> float:
        c = self._half
        return 2 * m * k * n * (1 + c / m) * (1 + c / k) * (1 + c / n) / self._peak


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published step: what is predicted, and the seconds to compare with."""

    model: Transformer
    layout: Layout
    machine: Machine
    software: Software
    seconds: float


HALF = 200.0
"""``half`` is not fitted: the few single-node rows agree alike with 70 to 300. Public fits for the A100 put
it at 400 where the peak is reached wholly; this is the middle."""


def fit(rows: Sequence[Published]) -> Kernels:
    """``reached``, ``unfused``, ``fused``, ``links``: least squares of logarithms over single-node rows."""
    best = Kernels(reached=0.9, half=HALF, unfused=1.6, fused=1.6, links=1.0)
    error = _error(best, rows)
    width = 0.2
    while width > 0.004:
        tried = [
            replace(best, **{name: getattr(best, name) * factor})
            for name in ("reached", "unfused", "fused", "links")
            for factor in (1 - width, 1 + width)
            if name != "reached" or best.reached * factor <= 1.0
        ]
        found = min(tried, key=lambda kernels: _error(kernels, rows))
        if _error(found, rows) < error:
            best, error = found, _error(found, rows)
        else:
            width /= 2
    return best


def _error(kernels: Kernels, rows: Sequence[Published]) -> float:
    return sum(
        math.log(step(row.model, row.layout, row.machine, kernels, row.software).total / row.seconds) ** 2
        for row in rows
    )

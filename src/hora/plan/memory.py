"""Memory of one GPU: parameters, gradients, optimizer state, activations; and what would make a model fit.

Sizes are bytes. The equations of activations are those of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198), for any width of the feed-forward block,
grouped queries and gated units; the ZeRO stages are those of Rajbhandari et al. (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hora.core.errors import UsageError

__all__ = [
    "ADAM_FP32",
    "ADAM_MIXED",
    "DEEPSPEED",
    "MEGATRON",
    "SGD_FP32",
    "SGD_MIXED",
    "Change",
    "Cnn",
    "Layout",
    "Memory",
    "Precision",
    "Transformer",
    "activations_per_layer",
    "estimate",
    "estimate_cnn",
    "states",
    "what_would_fit",
]

GB = 1e9
OTHER = 1.0 * GB
"""CUDA context, NCCL's channels and the libraries' workspaces. Our assumption: they take 0.7 to 1.5 GB."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter that stay between steps.

    ``whole_gradients`` says that a worker holds all of its gradients for a while even where ZeRO divides
    them, as DeepSpeed's estimators count: then ``optimizer`` holds the divided copy.
    """

    parameter: float
    gradient: float
    optimizer: float
    activation: float = 2.0
    whole_gradients: bool = False


ADAM_MIXED = Precision(parameter=2, gradient=2, optimizer=12)
MEGATRON = Precision(parameter=2, gradient=4, optimizer=12)
DEEPSPEED = Precision(parameter=2, gradient=2, optimizer=16, whole_gradients=True)
ADAM_FP32 = Precision(parameter=4, gradient=4, optimizer=8, activation=4)
SGD_FP32 = Precision(parameter=4, gradient=4, optimizer=4, activation=4)
SGD_MIXED = Precision(parameter=2, gradient=2, optimizer=8)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a transformer. ``feed_forward`` and ``kv_heads`` are 4 x hidden and ``heads`` where 0."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True
    positions: bool = True

    @property
    def ffn_ratio(self) -> float:
        """Width of the feed-forward block over the hidden size."""
        return (self.feed_forward or 4 * self.hidden) / self.hidden

    @property
    def kv_ratio(self) -> float:
        """Heads of keys and values over heads of queries."""
        return (self.kv_heads or self.heads) / self.heads

    @property
    def layer_parameters(self) -> float:
        """Of one layer: attention, feed-forward, biases and both norms."""
        matrices = (2 + 2 * self.kv_ratio) + self.ffn_ratio * (3 if self.gated else 2)
        return matrices * self.hidden**2 + (9 + self.ffn_ratio) * self.hidden

    @property
    def embedding_parameters(self) -> float:
        """Of the vocabulary (once when tied) and of learned positions."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + (
            self.sequence * self.hidden if self.positions else 0
        )

    @property
    def parameters(self) -> float:
        """All of them."""
        return self.layers * self.layer_parameters + self.embedding_parameters + 2 * self.hidden


@dataclass(frozen=True, kw_only=True)
class Cnn:
    """A convolutional network, as a preset knows it. ``activation_bytes`` is of one sample, all layers."""

    parameters: float
    activation_bytes: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model and its batch are spread over GPUs."""

    micro_batch: int = 1
    micro_batches: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    interleaved: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    flash: bool = False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    other: float = OTHER

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a layout and the memory after it and all changes before it."""

    what: str
    layout: Layout
    memory: Memory
    fits: bool


def states(
    parameters: float, *, precision: Precision, zero: int = 0, data: int = 1, largest: float = 0.0
) -> Memory:
    """Parameters, gradients and optimizer state of one GPU, without activations.

    Args:
        parameters: that this GPU would hold without ZeRO (divided by tensor and pipeline already).
        precision: bytes per parameter.
        zero: stage 0 to 3.
        data: number of data-parallel workers.
        largest: parameters of the largest layer, gathered whole under stage 3.

    Raises:
        UsageError: for a stage that ZeRO does not have or fewer than one worker.
    """
    if zero not in (0, 1, 2, 3):
        raise UsageError(f"zero={zero}: ZeRO has stages 0 to 3.", fix=f"Write zero={min(3, max(0, zero))}.")
    if data < 1:
        raise UsageError(f"data={data}: there is at least one worker.", fix="Write data=1.")
    weight = parameters * precision.parameter / (data if zero == 3 else 1)
    optimizer = parameters * precision.optimizer / (data if zero >= 1 else 1)
    gradient = parameters * precision.gradient
    if zero == 3 and precision.whole_gradients:
        gradient = 0.0
    elif zero >= 2 and not precision.whole_gradients:
        gradient /= data
    if zero == 3:
        weight += largest * precision.parameter
        gradient += largest * precision.gradient
    return Memory(parameters=weight, gradients=gradient, optimizer=optimizer, activations=0.0, other=0.0)


def activations_per_layer(model: Transformer, layout: Layout, *, activation: float = 2.0) -> float:
    """Bytes of one layer's activations for one micro-batch on one GPU.

    ``sbh (10 + 24/t + 5as/(ht))`` for a GPT layer in 16 bits; with sequence parallelism the 10 is divided
    too; selective recomputation and flash attention leave out the last term; full recomputation keeps
    ``2sbh``.
    """
    s, b, h, t = model.sequence, layout.micro_batch, model.hidden, layout.tensor
    scale = activation / 2
    whole = (
        8 * scale + 2
    )  # inputs of both norms, of QKV and of the feed-forward block; two dropout masks of 1 byte
    divided = scale * (4 + 4 * model.kv_ratio + (6 if model.gated else 4) * model.ffn_ratio)
    scores = (4 * scale + 1) * model.heads * s / h  # softmax, its dropout's output; a mask of 1 byte
    if layout.recompute == "full":
        return activation * s * b * h / (t if layout.sequence_parallel else 1)
    kept = divided / t + whole / (t if layout.sequence_parallel else 1)
    if layout.recompute == "none" and not layout.flash:
        kept += scores / t
    return s * b * h * kept


def estimate(model: Transformer, layout: Layout, *, precision: Precision = ADAM_MIXED) -> Memory:
    """Memory of the fullest GPU of a transformer's training.

    The first stage of a pipeline holds ``min(micro_batches, pipeline)`` micro-batches (1F1B), interleaving
    adds ``(p-1)/(pv)``; the last stage holds the logits in 32 bits. The fuller of the two counts.

    Raises:
        UsageError: when the layout does not divide the model; it names the nearest layouts that do.
    """
    _check(model, layout)
    p, t = layout.pipeline, layout.tensor
    layers = model.layers / p
    held = (layers * model.layer_parameters + model.vocabulary * model.hidden) / t
    held += model.sequence * model.hidden if model.positions else 0
    if p == 1 and not model.tied:
        held += model.vocabulary * model.hidden / t
    state = states(
        held,
        precision=precision,
        zero=layout.zero,
        data=layout.data,
        largest=max(model.layer_parameters, model.vocabulary * model.hidden) / t,
    )
    per_layer = activations_per_layer(model, layout, activation=precision.activation)
    tokens = model.sequence * layout.micro_batch
    in_flight = min(layout.micro_batches, p) * layers
    if layout.interleaved > 1:
        in_flight *= 1 + (p - 1) / (p * layout.interleaved)
    rebuilt = 0.0  # one layer's activations come back while its backward runs
    if layout.recompute != "none":
        plain = replace(layout, recompute="none")
        rebuilt = activations_per_layer(model, plain, activation=precision.activation) - per_layer
    logits = tokens * (4.0 * model.vocabulary + 2 * precision.activation * model.hidden) / t
    dropout = tokens * model.hidden * min(layout.micro_batches, p) / (t if layout.sequence_parallel else 1)
    first = in_flight * per_layer + dropout + (logits if p == 1 else 0)
    last = layers * per_layer + logits
    return replace(state, activations=max(first, last) + max(0.0, rebuilt), other=OTHER)


def estimate_cnn(
    model: Cnn, *, micro_batch: int, precision: Precision = SGD_MIXED, data: int = 1, zero: int = 0
) -> Memory:
    """Memory of one GPU of a convolutional network's data-parallel training.

    Raises:
        UsageError: without samples.
    """
    if micro_batch < 1:
        raise UsageError(
            f"micro_batch={micro_batch}: a worker needs samples.", fix="Write micro_batch=1 or more."
        )
    state = states(model.parameters, precision=precision, zero=zero, data=data)
    return replace(state, activations=model.activation_bytes * micro_batch, other=OTHER)


def what_would_fit(
    model: Transformer,
    layout: Layout,
    *,
    capacity: float,
    gpus_per_node: int = 8,
    precision: Precision = ADAM_MIXED,
) -> list[Change]:
    """Changes that make a model fit into ``capacity`` bytes: cheapest first, each on top of those before it.

    Changes that gain nothing are left out; the list ends with the first layout that fits, or with the last
    thing that can be tried. It is empty when the layout fits as it is.
    """
    memory = estimate(model, layout, precision=precision)
    changes: list[Change] = []
    for what, change in _remedies(gpus_per_node):
        while memory.total > capacity:
            after = change(layout)
            if after is None or not _valid(model, after):
                break
            smaller = estimate(model, after, precision=precision)
            if smaller.total >= memory.total:
                break
            layout, memory = after, smaller
            changes.append(
                Change(what=what(layout), layout=layout, memory=memory, fits=memory.total <= capacity)
            )
    return changes


_Step = tuple[Callable[[Layout], str], Callable[[Layout], "Layout | None"]]


def _remedies(gpus_per_node: int) -> list[_Step]:
    """What to try, in the order of what it costs in time; each name tells the layout after it."""

    def halve(now: Layout) -> Layout | None:
        if now.micro_batch == 1:
            return None
        half = now.micro_batch // 2
        return replace(now, micro_batch=half, micro_batches=now.micro_batches * (now.micro_batch // half))

    def zero(stage: Literal[1, 2, 3]) -> Callable[[Layout], Layout | None]:
        # Gradients cannot be divided while a pipeline adds them up over micro-batches.
        return lambda now: (
            replace(now, zero=stage)
            if now.zero < stage and now.data > 1 and (stage == 1 or now.pipeline == 1)
            else None
        )

    def tensor(now: Layout) -> Layout | None:
        t = 2 * now.tensor
        if t > gpus_per_node:
            return None
        return replace(now, tensor=t, data=max(1, now.data // 2), sequence_parallel=True)

    def pipeline(now: Layout) -> Layout | None:
        p = 2 * now.pipeline
        if now.zero > 1:
            return None
        return replace(
            now, pipeline=p, data=max(1, now.data // 2), micro_batches=max(now.micro_batches, 4 * p)
        )

    return [
        (lambda _: "flash attention", lambda now: None if now.flash else replace(now, flash=True)),
        (lambda _: "ZeRO stage 1: optimizer state divided among the workers", zero(1)),
        (
            lambda _: "sequence parallelism",
            lambda now: (
                replace(now, sequence_parallel=True) if now.tensor > 1 and not now.sequence_parallel else None
            ),
        ),
        (lambda now: f"micro-batch {now.micro_batch}, {now.micro_batches} per step", halve),
        (lambda _: "ZeRO stage 2: gradients divided too", zero(2)),
        (
            lambda _: "full recomputation of activations",
            lambda now: None if now.recompute == "full" else replace(now, recompute="full"),
        ),
        (lambda _: "ZeRO stage 3: parameters divided too", zero(3)),
        (lambda now: f"tensor parallel over {now.tensor} GPUs", tensor),
        (lambda now: f"a pipeline of {now.pipeline} stages", pipeline),
    ]


def _check(model: Transformer, layout: Layout) -> None:
    for name in ("micro_batch", "micro_batches", "tensor", "pipeline", "data", "interleaved"):
        value = getattr(layout, name)
        if value < 1:
            raise UsageError(f"{name}={value}: it is at least 1.", fix=f"Write {name}=1.")
    stages = layout.pipeline * layout.interleaved
    _divides(
        "layers", model.layers, "pipeline" if layout.interleaved == 1 else "pipeline x interleaved", stages
    )
    _divides("heads", model.heads, "tensor", layout.tensor)


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        divisors = [n for n in range(1, value + 1) if value % n == 0]
        below, above = [n for n in divisors if n < by], [n for n in divisors if n > by]
        near = " or ".join(str(n) for n in below[-1:] + above[:1])
        raise UsageError(f"{by_name}={by} does not divide {name}={value}.", fix=f"Use {near}.")


def _valid(model: Transformer, layout: Layout) -> bool:
    return model.layers % (layout.pipeline * layout.interleaved) == 0 and model.heads % layout.tensor == 0

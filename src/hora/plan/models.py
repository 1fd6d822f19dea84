"""Models that a plan knows by name: their size, their work, their data set and how they converge.

``flops`` are of forward and backward of one sample (a token where ``unit`` is tokens), 2 per multiply-add.
``kernels`` are the launches of one step, estimated from the layers: 3 x the forward's operations, and the
update of each parameter (three for LARS, with its two norms). Both are only where the fit of measured rows
starts from (``calibration``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hora.core.errors import UsageError
from hora.plan.hardware import nearest
from hora.plan.memory import Cnn, Transformer

__all__ = ["GPTS", "WORKLOADS", "Workload", "workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model whose step time is affine in its batch, data parallel.

    Attributes:
        parameters: number of them; gradients take 2 bytes each in mixed precision, 4 else.
        flops: of one sample's forward and backward.
        kernels: launches of one step.
        unit: of the batch: images, sequences or tokens.
        batch: per GPU in mixed precision where nothing else is said; half of it in 32 bits.
        samples: of one epoch, in ``unit``; 0 where none is fixed.
        curve: the benchmark whose reference convergence points say how many epochs it needs.
        activations: bytes of one sample in 16 bits, for memory; 0 where a shape tells them.
        shape: of a transformer.
        evaluate_every: epochs between two evaluations.
        evaluation: GPU-seconds of one evaluation on V100s, means of MLPerf v0.6's single-node runs.
        overhead: seconds of a run besides training and evaluation, likewise.
        sequential: a chain of dependent operations over time that no batch hides (recurrent models).
    """

    name: str
    parameters: float
    flops: float
    kernels: int
    unit: str
    batch: int
    samples: float = 0.0
    curve: str = ""
    activations: float = 0.0
    shape: Transformer | None = None
    evaluate_every: float = 1.0
    evaluation: float = 0.0
    overhead: float = 0.0
    sequential: bool = False

    @property
    def cnn(self) -> Cnn:
        """What memory is estimated from where there is no shape."""
        return Cnn(parameters=self.parameters, activation_bytes=self.activations)


IMAGENET = 1_281_167
COCO = 117_266
"""Images of COCO 2017 train that have annotations, the epoch of SSD and Mask R-CNN."""
BERT = Transformer(layers=24, hidden=1024, heads=16, sequence=128, vocabulary=30_528)

WORKLOADS: dict[str, Workload] = {
    found.name: found
    for found in (
        # 4.1 G multiply-adds an image at 224 pixels; 22 GB of activations at batch 256 in mixed precision
        Workload(
            name="resnet50",
            parameters=25.6e6,
            flops=24.6e9,
            kernels=930,
            unit="images",
            batch=256,
            samples=IMAGENET,
            curve="resnet",
            evaluate_every=4,
            evaluation=30,
            overhead=3,
            activations=86e6,
        ),
        Workload(
            name="ssd300",
            parameters=20e6,
            flops=90e9,
            kernels=1100,
            unit="images",
            batch=64,
            samples=COCO,
            curve="ssd",
            evaluate_every=12,
            evaluation=100,
            activations=130e6,
        ),
        Workload(
            name="maskrcnn",
            parameters=44.3e6,
            flops=1.6e12,
            kernels=7000,
            unit="images",
            batch=6,
            samples=COCO,
            curve="maskrcnn",
            evaluation=1020,
            activations=3.0e9,
        ),
        # 6 x parameters a token (embeddings apart); 50 tokens a pair of sentences, both sides
        Workload(
            name="gnmt",
            parameters=160e6,
            flops=0.6e9,
            kernels=1600,
            unit="tokens",
            batch=6400,
            samples=3.97e6 * 50,
            curve="gnmt",
            evaluation=18,
            overhead=0.3,
            activations=0.25e6,
            sequential=True,
        ),
        Workload(
            name="transformer-big",
            parameters=210.8e6,
            flops=1.06e9,
            kernels=1400,
            unit="tokens",
            batch=8192,
            samples=133.9e6,
            curve="transformer",
            evaluation=55,
            overhead=1.1,
            activations=0.9e6,
        ),
        Workload(
            name="transformer-xl-base",
            parameters=192e6,
            flops=0.3e9,
            kernels=1900,
            unit="tokens",
            batch=32 * 192,
            activations=1.1e6,
        ),
        Workload(
            name="transformer-xl-large",
            parameters=285e6,
            flops=1.7e9,
            kernels=2200,
            unit="tokens",
            batch=8 * 128,
            activations=2.6e6,
        ),
        Workload(
            name="bert-large",
            parameters=336e6,
            flops=6 * 303e6 * 128,
            kernels=2500,
            unit="sequences",
            batch=64,
            curve="bert",
            shape=BERT,
        ),
    )
}


def _gpt(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int = 51_200) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary)


# Megatron-LM (arXiv:1909.08053) table 1; Efficient Large-Scale Training (arXiv:2104.04473) table 1.
GPTS: dict[str, Transformer] = {
    "gpt2-1.2b": _gpt(40, 1536, 16, 1024),
    "gpt2-2.5b": _gpt(54, 1920, 20, 1024),
    "gpt2-4.2b": _gpt(64, 2304, 24, 1024),
    "gpt2-8.3b": _gpt(72, 3072, 32, 1024),
    "gpt-1.7b": _gpt(24, 2304, 24, 2048),
    "gpt-7.5b": _gpt(36, 4096, 32, 2048),
    "gpt-39b": _gpt(48, 8192, 64, 2048),
    "gpt3-175b": _gpt(96, 12_288, 96, 2048),
    "gpt-530b": _gpt(105, 20_480, 128, 2048),
    "gpt-1t": _gpt(128, 25_600, 160, 2048),
}


def workload(name: str) -> Workload | Transformer:
    """A preset.

    Raises:
        UsageError: there is none of this name; it names the nearest.
    """
    found: Workload | Transformer | None = WORKLOADS.get(name) or GPTS.get(name)
    if found is None:
        known = {**WORKLOADS, **GPTS}
        raise UsageError(
            f"{name}: no such model. Known are {', '.join(known)}; --layers, --hidden, --heads, --sequence "
            "describe another transformer, --profile RUN your own script.",
            fix=f"Write hora plan {nearest(name, known)}.",
        )
    return found

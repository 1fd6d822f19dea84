"""What a ResNet training is made of: one frozen dataclass per component, and the profiles.

Imports no framework, so that the command line can check everything before a worker starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["PROFILES", "RESNET50", "SMALL", "DataConfig", "ModelConfig", "OptimizerConfig", "Profile"]

Precision = Literal["auto", "bfloat16", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images.

    Attributes:
        kind: Fashion-MNIST's balanced subset, all of Fashion-MNIST, or a folder tree like ImageNet's.
        path: where they are; None: wherever Fashion-MNIST is found.
        shift: random shift of training images in pixels, each way (Fashion-MNIST).
        image_size: side in pixels after cropping (folder tree).
        decoders: threads per worker that decode images (folder tree).
    """

    kind: Literal["subset", "full", "folder"] = "subset"
    path: Path | None = None
    shift: int = 1
    image_size: int = 224
    decoders: int = 4

    @property
    def side(self) -> int:
        """Height and width of what the model gets, in pixels."""
        return self.image_size if self.kind == "folder" else 28


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A ResNet v1.5 with bottleneck blocks.

    Attributes:
        stem: ``small``: 3x3 convolution of stride 2; ``imagenet``: 7x7 of stride 2, then 3x3 max-pooling.
        channels: channels of the images.
        classes: outputs.
        stem_width: channels after the stem.
        widths: inner channels of the blocks of each stage; a block's output has four times as many.
        depths: blocks of each stage.
        norm: ``none`` is for tests of exactness: batch normalization sees each worker's micro-batch only.
        zero_gamma: start the last normalization of each block at 0, so that blocks begin as identities.
    """

    stem: Literal["small", "imagenet"] = "small"
    channels: int = 1
    classes: int = 10
    stem_width: int = 16
    widths: tuple[int, ...] = (16, 32, 64)
    depths: tuple[int, ...] = (2, 2, 2)
    norm: Literal["batch", "none"] = "batch"
    zero_gamma: bool = False


SMALL = ModelConfig()
"""220,090 parameters, for images of 28x28."""
RESNET50 = ModelConfig(
    stem="imagenet", channels=3, classes=1000, stem_width=64, widths=(64, 128, 256, 512), depths=(3, 4, 6, 3)
)
"""ResNet-50 v1.5: 25,557,032 parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule: linear warm-up, then polynomial decay.

    ``end_lr``, ``power``, ``momentum`` and LARS's ``epsilon`` have the values that the rules of MLPerf
    Training v0.7 fix for ResNet; ``weight_decay`` has to be 1e-4 times a power of two there.

    Attributes:
        lr: peak learning rate at the profile's own global batch; another one scales it linearly.
        warmup_epochs: may be a fraction.
        eta: trust coefficient of LARS.
    """

    name: Literal["sgd", "lars"] = "sgd"
    lr: float = 0.2
    end_lr: float = 1e-4
    power: float = 2.0
    momentum: float = 0.9
    weight_decay: float = 4e-4
    warmup_epochs: float = 1.0
    eta: float = 0.001
    epsilon: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One way to train the workload.

    Attributes:
        target: top-1 accuracy on the test images, 0 to 1, at which the training has succeeded.
        optimizers: what ``--optimizer`` chooses from; the first is the default.
        eval_batch: samples of all workers together in one step of an evaluation.
        evaluate_from: the first epoch, from 1, after which there is an evaluation.
        train_on: finish the schedule although the target is reached.
        log_every: steps between two records in metrics.jsonl.
        calibration_seconds: about how long the measurement of the scaling factor may take; 0: none.
        checkpoint_every: steps between checkpoints; None: only when the job is asked to stop.
    """

    name: str
    target: float
    epochs: int
    global_batch: int
    data: DataConfig
    model: ModelConfig
    optimizers: tuple[OptimizerConfig, ...]
    eval_batch: int = 500
    label_smoothing: float = 0.1
    precision: Precision = "auto"
    seed: int = 1
    train_on: bool = False
    evaluate_from: int = 1
    log_every: int = 5
    calibration_seconds: float = 8.0
    checkpoint_every: int | None = None

    @property
    def targets(self) -> dict[str, float]:
        """The target, by what it is measured in."""
        return {"accuracy": self.target}

    @property
    def optimizer(self) -> OptimizerConfig:
        """The one that trains: the first."""
        return self.optimizers[0]


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="quick",
            target=0.87,
            epochs=10,
            global_batch=128,
            data=DataConfig(kind="subset"),
            model=SMALL,
            # Twice the rate is as fast, but its first evaluation sees a model in turmoil.
            optimizers=(OptimizerConfig(lr=0.1), OptimizerConfig(name="lars", lr=5.0)),
        ),
        Profile(
            name="full",
            target=0.91,
            epochs=12,
            global_batch=128,
            data=DataConfig(kind="full"),
            model=SMALL,
            optimizers=(OptimizerConfig(), OptimizerConfig(name="lars", lr=5.0)),
        ),
        Profile(
            name="reference",
            target=0.759,
            epochs=90,
            global_batch=256,
            data=DataConfig(kind="folder"),
            model=RESNET50,
            # Base rate, batch and warm-up of the MLPerf reference; LARS as its tuned rates below 8k.
            optimizers=(
                OptimizerConfig(lr=0.128, weight_decay=1e-4, warmup_epochs=5.0),
                OptimizerConfig(name="lars", lr=5.0, weight_decay=2e-4, warmup_epochs=5.0),
            ),
            eval_batch=256,
            log_every=20,
        ),
    )
}

"""What trainings of detectors have in common: data, schedule, length and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hora.core.errors import UsageError

__all__ = ["DataConfig", "Profile", "SceneConfig", "Schedule"]


@dataclass(frozen=True, kw_only=True)
class SceneConfig:
    """How scenes are made.

    Attributes:
        side: height and width in pixels.
        train: number of training scenes.
        test: number of test scenes.
        most: items in a scene, at most; at least one.
        smallest: side of the smallest items in pixels.
        largest: side of the largest.
        subset: take the items from the subset of Fashion-MNIST that the package ships.
        seed: of the scenes; another one makes other scenes from the same photos.
    """

    side: int = 128
    train: int = 8000
    test: int = 500
    most: int = 4
    smallest: int = 28
    largest: int = 64
    subset: bool = True
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which pictures.

    Attributes:
        kind: scenes made of real photos, or COCO 2017 as it is downloaded.
        path: COCO's folder, which holds ``annotations``, ``train2017`` and ``val2017``.
        scenes: how scenes are made.
        loaders: processes per worker that decode, compose and augment.
    """

    kind: Literal["scenes", "coco"] = "scenes"
    path: Path | None = None
    scenes: SceneConfig = field(default_factory=SceneConfig)
    loaders: int = 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """SGD with momentum: linear warm-up, then steps down.

    Attributes:
        lr: learning rate at the profile's own global batch; another one scales it linearly.
        warmup_steps: over which the rate grows from nothing.
        decay_at: epochs, may be fractions, after each of which the rate is ``factor`` of what it was.
        bias_lr: learning rate of biases, as a multiple; 2 in the reference of Mask R-CNN.
    """

    lr: float
    weight_decay: float
    warmup_steps: int
    decay_at: tuple[float, ...]
    factor: float = 0.1
    momentum: float = 0.9
    bias_lr: float = 1.0

    def at(self, step: int, *, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        passed = sum(step >= round(epoch * steps_per_epoch) for epoch in self.decay_at)
        return float(self.lr * self.factor**passed)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One way to train a detector.

    Attributes:
        targets: average precision by boxes (``bbox``) and by masks (``segm``), 0 to 1, that one and the
            same evaluation has to reach.
        evaluate_from: the first epoch, from 1, after which there is an evaluation.
        backbone: a file of weights that the backbone starts from.
        train_on: finish the schedule although the target is reached.
        log_every: steps between two records in metrics.jsonl.
        eval_batch: pictures of all workers together in one step of an evaluation.
        checkpoint_every: steps between checkpoints; None: only when the job is asked to stop.
    """

    name: str
    targets: Mapping[str, float]
    epochs: int
    global_batch: int
    data: DataConfig
    schedule: Schedule
    eval_batch: int = 64
    evaluate_from: int = 1
    seed: int = 1
    backbone: Path | None = None
    train_on: bool = False
    log_every: int = 10
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - {"bbox", "segm"})
        if unknown or not self.targets:
            raise UsageError(
                f"targets={dict(self.targets)} of profile {self.name} are none that detectors have.",
                fix="Give {'bbox': 0.23}, and 'segm' for masks.",
            )

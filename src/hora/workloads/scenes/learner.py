"""What the training loop needs of a detector, and what all detectors' learners share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import hora.torch as hora
from hora.workloads.scenes.batches import Batch
from hora.workloads.scenes.config import Profile, Schedule
from hora.workloads.scenes.sample import Sample

__all__ = ["Detected", "Learner", "agree_on_statistics", "make_optimizer", "set_rate"]

Transform = Callable[[Sample], Sample]


@dataclass(frozen=True, kw_only=True)
class Detected:
    """What was found in one picture, the best first.

    Attributes:
        number: of the picture.
        boxes: [found, 4], in pixels of the picture as the network got it.
        labels: [found], from 0.
        scores: [found], 0 to 1.
        masks: bool, [found, height, width]; None where the network makes none.
    """

    number: int
    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None = None


class Learner(Protocol):
    """A model on this worker's device with its optimizer. All ranks start with the same weights."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps the model."""
        ...

    @property
    def profile(self) -> Profile:
        """How it is trained, on what."""
        ...

    @property
    def multiple(self) -> int:
        """Sides of pictures are padded to multiples of it, in pixels."""
        ...

    def transforms(self) -> tuple[Transform, Transform]:
        """What is done to training and to test samples, in the loader's processes."""
        ...

    def hyperparameters(self, *, steps: int) -> Mapping[str, Any]:
        """The hyperparameters that MLPerf's rules ask for, by their keys; ``steps`` make an epoch."""
        ...

    def step(self, batch: Batch, *, lr: float, epoch: int) -> Mapping[str, Tensor]:
        """One training step on this worker's pictures; its losses, detached, the one trained first."""
        ...

    def detect(self, batch: Batch) -> Sequence[Detected]:
        """What the model finds, by the running statistics of its normalizations."""
        ...


def make_optimizer(model: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """SGD, without weight decay on normalizations and biases."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    biases = [value for name, value in named if name.endswith("bias")]
    scales = [value for name, value in named if value.ndim <= 1 and not name.endswith("bias")]
    weights = [value for _, value in named if value.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": schedule.weight_decay, "times": 1.0},
        {"params": scales, "weight_decay": 0.0, "times": 1.0},
        {"params": biases, "weight_decay": 0.0, "times": schedule.bias_lr},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.SGD(groups, lr=schedule.lr, momentum=schedule.momentum)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameters the learning rate of the next step, biases their multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["times"]


def agree_on_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their running statistics, so that they evaluate one and the same model."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if hora.size() == 1 or not buffers:
        return
    flat = hora.allreduce(torch.cat([buffer.flatten() for buffer in buffers]), name="running statistics")
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))

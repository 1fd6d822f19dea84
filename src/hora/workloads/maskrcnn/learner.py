"""Mask R-CNN's model, optimizer and numerics on a worker: what one step and one detection do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hora.torch as hora
from hora.core.errors import DataError
from hora.mlperf import maskrcnn_hyperparameters
from hora.workloads.maskrcnn.augment import Prepare
from hora.workloads.maskrcnn.config import MaskRCNNProfile
from hora.workloads.maskrcnn.model import MaskRCNN, Objects
from hora.workloads.scenes.batches import Batch, normalize
from hora.workloads.scenes.learner import Detected, Transform, make_optimizer, set_rate
from hora.workloads.scenes.regions import paste
from hora.workloads.scenes.weights import load_backbone

__all__ = ["MaskRCNNLearner"]

MULTIPLE = 32
"""Largest stride of the pyramid's stages: sides of padded pictures are multiples of it."""


class MaskRCNNLearner:
    """Mask R-CNN on this worker's device. Fulfils :class:`hora.workloads.scenes.learner.Learner`.

    Args:
        profile: what to train; its seed gives the weights.
        dtype: of the weights and of all computing.

    Raises:
        DataError: a file of weights that is missing or does not fit.
    """

    multiple = MULTIPLE

    def __init__(self, profile: MaskRCNNProfile, *, dtype: torch.dtype = torch.float32) -> None:
        self.profile = profile
        self.device = hora.device()
        self.dtype = dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(profile.seed)
            model = MaskRCNN(profile.model)
        if profile.backbone is not None:
            load_backbone(model.backbone, profile.backbone)
        elif profile.model.backbone == "resnet50":
            raise DataError(
                "ResNet-50 starts from weights here: its normalizations and first stage do not learn.",
                fix="Give a state dict of torchvision's ResNet-50 with --backbone PATH.",
            )
        self.model = model.to(device=self.device, dtype=dtype)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer: torch.optim.Optimizer = hora.DistributedOptimizer(
            make_optimizer(self.model, profile.schedule), self.model
        )

    def transforms(self) -> tuple[Transform, Transform]:
        return Prepare(self.profile, training=True), Prepare(self.profile, training=False)

    def hyperparameters(self, *, steps: int) -> Mapping[str, Any]:
        profile, schedule = self.profile, self.profile.schedule
        side = profile.data.scenes.side  # pictures are not scaled where short_side is 0
        return maskrcnn_hyperparameters(
            global_batch=profile.global_batch,
            lr=schedule.lr,
            warmup_steps=schedule.warmup_steps,
            decay_factor=schedule.factor,
            decay_steps=[round(epoch * steps) for epoch in schedule.decay_at],
            candidates=profile.model.rpn.after[0],
            image_sizes=(profile.short_side or side, profile.long_side or side),
        )

    def step(self, batch: Batch, *, lr: float, epoch: int) -> Mapping[str, Tensor]:
        set_rate(self.optimizer, lr)
        self.optimizer.zero_grad()
        objects = Objects(
            boxes=batch.per_picture(batch.boxes.to(self.dtype)),
            labels=batch.per_picture(batch.labels),
            masks=batch.per_picture(batch.masks),
        )
        pictures = normalize(batch.pixels, self.dtype)
        losses = self.model(
            pictures, batch.sizes, objects, batch.numbers, seed=self.profile.seed, epoch=epoch
        )
        total = torch.stack(list(losses.values())).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return {"loss": total.detach()} | {f"{name} loss": value.detach() for name, value in losses.items()}

    def detect(self, batch: Batch) -> Sequence[Detected]:
        self.model.eval()
        found = self.model.detect(normalize(batch.pixels, self.dtype), batch.sizes)
        self.model.train()
        height, width = batch.pixels.shape[1:3]
        return [
            Detected(
                number=number,
                boxes=each.boxes,
                labels=each.labels,
                scores=each.scores,
                masks=paste(each.masks, each.boxes, height=height, width=width) > 0.5,
            )
            for number, each in zip(batch.numbers.tolist(), found, strict=True)
        ]

"""SSD's model, optimizer and numerics on a worker: what one step and one detection do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hora.torch as hora
from hora.mlperf import ssd_hyperparameters
from hora.workloads.scenes.batches import Batch, normalize
from hora.workloads.scenes.learner import Detected, Transform, make_optimizer, set_rate
from hora.workloads.scenes.weights import load_backbone
from hora.workloads.ssd import augment
from hora.workloads.ssd.anchors import default_boxes, match
from hora.workloads.ssd.config import SSDProfile
from hora.workloads.ssd.loss import detections, loss
from hora.workloads.ssd.model import SSD

__all__ = ["SSDLearner"]


class SSDLearner:
    """SSD on this worker's device. Fulfils :class:`hora.workloads.scenes.learner.Learner`.

    Args:
        profile: what to train; its seed gives the weights.
        dtype: of the weights and of all computing.

    Raises:
        DataError: a file of weights that does not fit.
    """

    multiple = 1

    def __init__(self, profile: SSDProfile, *, dtype: torch.dtype = torch.float32) -> None:
        self.profile = profile
        self.device = hora.device()
        self.dtype = dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(profile.seed)
            model = SSD(profile.model)
        if profile.backbone is not None:
            load_backbone(model.backbone, profile.backbone)
        self.model = model.to(device=self.device, dtype=dtype)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.anchors = default_boxes(profile.model).to(device=self.device, dtype=dtype)
        self.optimizer: torch.optim.Optimizer = hora.DistributedOptimizer(
            make_optimizer(self.model, profile.schedule), self.model
        )

    def transforms(self) -> tuple[Transform, Transform]:
        return augment.training(self.profile), augment.evaluation(self.profile)

    def hyperparameters(self, *, steps: int) -> Mapping[str, Any]:
        profile, schedule = self.profile, self.profile.schedule
        return ssd_hyperparameters(
            global_batch=profile.global_batch,
            lr=schedule.lr,
            weight_decay=schedule.weight_decay,
            warmup_steps=schedule.warmup_steps,
            decay_epochs=schedule.decay_at,
            bn_span=profile.global_batch // hora.size(),
        )

    def step(self, batch: Batch, *, lr: float, epoch: int) -> Mapping[str, Tensor]:
        set_rate(self.optimizer, lr)
        self.optimizer.zero_grad()
        boxes = batch.per_picture(batch.boxes.to(self.dtype) / self.profile.model.side)
        wanted, classes = match(boxes, batch.per_picture(batch.labels), self.anchors)
        places, logits = self.model(normalize(batch.pixels, self.dtype))
        total = loss(
            places,
            logits,
            wanted,
            classes,
            anchors=self.anchors,
            negatives=self.profile.negatives,
        )
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return {"loss": total.detach()}

    def detect(self, batch: Batch) -> Sequence[Detected]:
        profile = self.profile
        self.model.eval()
        with torch.no_grad():
            places, logits = self.model(normalize(batch.pixels, self.dtype))
        self.model.train()
        found = detections(
            places, logits, anchors=self.anchors, suppression=profile.suppression, most=profile.detections
        )
        return [
            Detected(number=number, boxes=boxes * profile.model.side, labels=labels, scores=scores)
            for number, (boxes, labels, scores) in zip(batch.numbers.tolist(), found, strict=True)
        ]

"""What a training of ResNet writes down: configuration, hyperparameters, result, some predictions."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hora.torch as hora
from hora.core.rundir import disk_errors
from hora.mlperf import resnet_hyperparameters
from hora.workloads.calibration import Scaling
from hora.workloads.loop import Outcome
from hora.workloads.resnet.config import Profile
from hora.workloads.resnet.data import Data
from hora.workloads.resnet.folder import need_pillow
from hora.workloads.resnet.learner import Learner

__all__ = ["config", "finish", "hyperparameters", "predictions"]

SHOWN, SHOWN_WRONG, LOOKED_AT = 40, 12, 600
"""Predictions in the report, how many wrong ones among them at most, and test images they are chosen from."""
PICTURE_SIDE = 64
"""Larger pictures are made smaller, so that the report stays small."""


def config(profile: Profile) -> dict[str, Any]:
    """What is going to be trained, for ``run.json``: only the optimizer that trains."""
    return dataclasses.asdict(dataclasses.replace(profile, optimizers=())) | {
        "optimizer": dataclasses.asdict(profile.optimizer)
    }


def hyperparameters(profile: Profile, *, steps: int) -> Mapping[str, float | int | str]:
    """The hyperparameters that MLPerf's rules ask for.

    Args:
        profile: what is trained.
        steps: per epoch.
    """
    config = profile.optimizer
    return resnet_hyperparameters(
        config.name,
        global_batch=profile.global_batch,
        lr=config.lr,
        end_lr=config.end_lr,
        power=config.power,
        decay_steps=profile.epochs * steps - round(config.warmup_epochs * steps),
        warmup_epochs=config.warmup_epochs,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        epsilon=config.epsilon,
        bn_span=profile.global_batch // hora.size(),
    )


def finish(learner: Learner, data: Data, outcome: Outcome, scaling: Scaling | None) -> None:
    """Write the summary and the sample predictions; rank 0 does it, alone."""
    run = hora.context().run
    if hora.rank() != 0 or run is None:
        return
    shown = predictions(learner, data)
    with disk_errors(run.path):
        (run.path / "predictions.json").write_text(json.dumps(shown) + "\n", encoding="utf-8")
    profile = learner.profile
    run.describe(
        summary={
            "workload": "resnet",
            "profile": profile.name,
            "target": profile.target,
            "accuracy": outcome.values["accuracy"],
            "reached": outcome.reached,
            "epochs": outcome.epochs,
            "steps": outcome.steps,
            "time_to_train": outcome.time_to_train,
            "samples_per_second": outcome.samples_per_second,
            "data": data.origin,
            "precision": str(learner.dtype).removeprefix("torch."),
            "scaling_factor": None if scaling is None else scaling.factor,
            "scaling": None if scaling is None else dataclasses.asdict(scaling),
            "workers": hora.size(),
        }
    )


def predictions(learner: Learner, data: Data) -> dict[str, Any]:
    """Test images with what the model says, evenly over the test set, some wrong ones among them."""
    count = len(data.test)
    looked_at = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
    labels, predicted, confidence = [], [], []
    for part in np.array_split(looked_at, max(1, len(looked_at) // 100)):
        images, truth = learner.put(data.test.batch(part.tolist()))
        most, which = learner.predict(images).softmax(dim=1).max(dim=1)
        labels += truth.tolist()
        predicted += which.tolist()
        confidence += most.tolist()
    wrong = [index for index in range(len(looked_at)) if labels[index] != predicted[index]]
    wrong = wrong[:: max(1, len(wrong) // SHOWN_WRONG)][:SHOWN_WRONG]
    right = [index for index in range(len(looked_at)) if labels[index] == predicted[index]]
    room = SHOWN - len(wrong)
    chosen = sorted(wrong + right[:: max(1, len(right) // room)][:room])
    return {
        "classes": list(data.test.classes),
        "images": [
            {
                "png": _png(data.test.picture(int(looked_at[index]))),
                "label": labels[index],
                "predicted": predicted[index],
                "confidence": round(confidence[index], 4),
            }
            for index in chosen
        ],
    }


def _png(pixels: NDArray[np.uint8]) -> str:
    need_pillow()
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()

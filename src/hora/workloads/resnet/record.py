"""What a training writes down: its configuration, the MLPerf log, its result, some predictions."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import hora.torch as hora
from hora.core.plural import plural
from hora.core.rundir import disk_errors
from hora.mlperf import MLPerfLog, resnet_hyperparameters
from hora.workloads.calibration import Scaling
from hora.workloads.resnet.config import Profile
from hora.workloads.resnet.data import Data
from hora.workloads.resnet.folder import need_pillow
from hora.workloads.resnet.learner import Learner

if TYPE_CHECKING:
    from hora.workloads.resnet.train import Outcome

__all__ = ["Pace", "begin", "finish", "hyperparameters", "initialized", "mlperf_path", "predictions"]

SHOWN, SHOWN_WRONG, LOOKED_AT = 40, 12, 600
"""Predictions in the report, how many wrong ones among them at most, and test images they are chosen from."""
PICTURE_SIDE = 64
"""Larger pictures are made smaller, so that the report stays small."""


@dataclass(frozen=True)
class Values:
    """Mean loss over the last steps of all ranks, and samples per second of each rank."""

    loss: float
    rates: list[float]


class Pace:
    """Collects losses and speeds between two records. Every rank counts; ``collect`` is a collective."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, for instance after an evaluation."""
        self._losses: list[torch.Tensor] = []
        self._samples = 0
        self._since = time.perf_counter()

    def count(self, loss: torch.Tensor, *, samples: int) -> None:
        """Take in one step of this rank: its mean loss and its number of samples."""
        self._losses.append(loss)
        self._samples += samples

    @property
    def due(self) -> bool:
        """Whether as many steps were counted as there are between two records; the same on every rank."""
        return len(self._losses) >= self._every

    def collect(self) -> Values:
        """The values since the last record, over all ranks; begins a new interval. Every rank calls it."""
        loss = torch.stack(self._losses).double().mean()
        rate = self._samples / (time.perf_counter() - self._since)
        rates = hora.allgather(torch.tensor([rate], dtype=torch.float64, device=hora.device())).tolist()
        mean = hora.mean(loss)
        self.restart()
        return Values(mean, [round(value, 1) for value in rates])


def mlperf_path() -> Path | None:
    """Where this rank writes ``mlperf.log``: only rank 0, and only with a run directory."""
    run = hora.context().run
    return run.mlperf_log if run is not None and hora.rank() == 0 else None


def begin(profile: Profile, log: MLPerfLog) -> None:
    """Write down what is going to be trained, on what."""
    workers = f"{hora.size()} {plural(hora.size(), 'worker')}"
    log.submission("resnet", platform=f"{platform.machine()}, {workers} on {hora.device().type}")
    log.event("cache_clear", False)  # nothing is flushed: that would take root
    log.start("init_start")
    here = hora.context()
    if here.run is not None and hora.rank() == 0:
        here.run.describe(
            config=dataclasses.asdict(dataclasses.replace(profile, optimizers=()))
            | {"optimizer": dataclasses.asdict(profile.optimizer)},
        )


def initialized(log: MLPerfLog) -> None:
    """Everything that needs no data is done. MLPerf's clock starts here."""
    hora.barrier()
    log.stop("init_stop")
    log.start("run_start")


def hyperparameters(profile: Profile, log: MLPerfLog, *, train: int, test: int, steps: int) -> None:
    """Write the hyperparameters that MLPerf's rules ask for.

    Args:
        profile: what is trained.
        log: where to.
        train: training samples.
        test: test samples.
        steps: per epoch.
    """
    config = profile.optimizer
    values = resnet_hyperparameters(
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
    for key, value in values.items():
        log.event(key, value)
    log.event("seed", profile.seed)
    log.event("train_samples", train)
    log.event("eval_samples", test)


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
            **dataclasses.asdict(outcome),
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

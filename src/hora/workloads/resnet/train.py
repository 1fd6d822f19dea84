"""Train a ResNet to its target: ``hora train resnet``, or ``hora run -n 2 -m hora.workloads.resnet.train``.

Every rank runs this file. What a training is made of is in config.py, one step of it in learner.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

import hora.torch as hora
from hora.mlperf import MLPerfLog
from hora.torch.optim import polynomial
from hora.workloads import loop, opening
from hora.workloads.calibration import Scaling, measure
from hora.workloads.loop import Outcome
from hora.workloads.resnet import data as images
from hora.workloads.resnet import options, record
from hora.workloads.resnet.config import Profile
from hora.workloads.resnet.data import Data
from hora.workloads.resnet.learner import Learner
from hora.workloads.start import start

__all__ = ["main", "run", "train"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the words of a command line say: what every worker of ``hora train resnet`` runs.

    Raises:
        UsageError: a value out of its range.
        DataError: images that are missing or damaged.
        TrainingError: the loss became infinite or not a number.
    """
    start("resnet", options, run, argv)


def run(profile: Profile) -> Outcome:
    """Train as the profile says, and write down how it went; between ``init`` and ``shutdown``."""
    torch.backends.cudnn.benchmark = True
    with MLPerfLog(opening.mlperf_path()) as log:
        opening.begin("resnet", log, config=record.config(profile))
        learner = Learner(profile)
        hora.broadcast_parameters(learner.model, root_rank=0)
        scaling = calibrate(learner)
        opening.initialized(log)
        started = time.perf_counter()  # from here on training data may be touched
        data = images.load(profile.data)
        outcome = train(learner, data, log, started=started)
    record.finish(learner, data, outcome, scaling)
    return outcome


def train(learner: Learner, data: Data, log: MLPerfLog, *, started: float) -> Outcome:
    """Train to the target on these images, by :func:`hora.workloads.loop.train`."""
    profile = learner.profile
    batches = hora.data_loader(indices(data.train), global_batch=profile.global_batch, seed=profile.seed)
    test = hora.data_loader(indices(data.test), global_batch=profile.eval_batch, shuffle=False, tail="uneven")
    opening.hyperparameters(
        record.hyperparameters(profile, steps=len(batches)),
        log,
        seed=profile.seed,
        train=len(data.train),
        test=len(data.test),
    )

    def step(share: tuple[torch.Tensor], lr: float, epoch: int) -> Mapping[str, torch.Tensor]:
        batch = data.train.batch(share[0].tolist(), seed=profile.seed, epoch=epoch)
        return {"loss": learner.step(*learner.put(batch), lr=lr)}

    def evaluate() -> Mapping[str, float]:
        loss, accuracy = learner.evaluate(data.test, test)
        return {"loss": loss, "accuracy": accuracy}

    return loop.train(
        loop.Task(
            profile=profile,
            model=learner.model,
            optimizer=learner.optimizer,
            loader=batches,
            rate=lambda step: learning_rate(profile, step, steps_per_epoch=len(batches)),
            step=step,
            evaluate=evaluate,
            score=lambda values: values["accuracy"],
            samples=lambda share: len(share[0]),
        ),
        log,
        started=started,
    )


def calibrate(learner: Learner) -> Scaling | None:
    """Measure the scaling factor on copies of the model and on noise; None for one worker."""
    profile = learner.profile
    if hora.size() == 1 or not profile.calibration_seconds:
        return None
    micro_batch = profile.global_batch // hora.size()
    batch = learner.random_batch(micro_batch, side=profile.data.side)
    alone, together = learner.scratch(distributed=False), learner.scratch(distributed=True)
    return measure(
        lambda: alone.step(*batch, lr=0.0),
        lambda: together.step(*batch, lr=0.0),
        samples=micro_batch,
        seconds=profile.calibration_seconds,
    )


def learning_rate(profile: Profile, step: int, *, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 0."""
    optimizer = profile.optimizer
    return polynomial(
        step,
        base=optimizer.lr,
        end=optimizer.end_lr,
        warmup=round(optimizer.warmup_epochs * steps_per_epoch),
        total=profile.epochs * steps_per_epoch,
        power=optimizer.power,
    )


def indices(split: images.Images) -> tuple[torch.Tensor]:
    """A split's sample numbers as a data set: the images are made from them a batch at a time."""
    return (torch.arange(len(split)),)


if __name__ == "__main__":
    main()

"""Train a ResNet to its target: ``hora train resnet``, or ``hora run -n 2 -m hora.workloads.resnet.train``.

Every rank runs this file. What a training is made of is in config.py, one step of it in learner.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import hora.torch as hora
from hora.core.errors import TrainingError
from hora.mlperf import MLPerfLog
from hora.torch.optim import polynomial
from hora.workloads.calibration import Scaling, measure
from hora.workloads.resnet import data as images
from hora.workloads.resnet import options, record
from hora.workloads.resnet.config import Profile
from hora.workloads.resnet.data import Data
from hora.workloads.resnet.learner import Learner
from hora.workloads.resnet.past import Past, checkpoints

__all__ = ["Outcome", "main", "run", "train"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended.

    Attributes:
        reached: whether an evaluation reached the target.
        accuracy: of the last evaluation, 0 to 1.
        time_to_train: seconds from the first touch of the training data until the target was known to be
            reached, or until the end of a training that did not reach it.
        samples_per_second: of all workers while they trained, evaluations left out.
    """

    reached: bool
    accuracy: float
    epochs: int
    steps: int
    time_to_train: float
    samples_per_second: float


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the words of a command line say: what every worker of ``hora train resnet`` runs.

    Raises:
        UsageError: a value out of its range.
        DataError: images that are missing or damaged.
        TrainingError: the loss became infinite or not a number.
    """
    parser = argparse.ArgumentParser(prog="python -m hora.workloads.resnet.train", description=__doc__)
    options.add(parser)
    profile = options.profile(parser.parse_args(argv))
    hora.init()
    run(profile)


def run(profile: Profile) -> Outcome:
    """Train as the profile says, and write down how it went; between ``init`` and ``shutdown``."""
    torch.backends.cudnn.benchmark = True
    with MLPerfLog(record.mlperf_path()) as log:
        record.begin(profile, log)
        learner = Learner(profile)
        hora.broadcast_parameters(learner.model, root_rank=0)
        scaling = calibrate(learner)
        record.initialized(log)
        started = time.perf_counter()  # from here on training data may be touched
        data = images.load(profile.data)
        outcome = train(learner, data, log, started=started)
    record.finish(learner, data, outcome, scaling)
    return outcome


def train(learner: Learner, data: Data, log: MLPerfLog, *, started: float) -> Outcome:
    """Train until an evaluation reaches the target, or for all epochs; evaluates after every epoch.

    Where the run directory, or the one of ``--resume``, has a checkpoint, the training goes on from there.
    """
    profile = learner.profile
    batches = hora.data_loader(indices(data.train), global_batch=profile.global_batch, seed=profile.seed)
    test = hora.data_loader(indices(data.test), global_batch=profile.eval_batch, shuffle=False, tail="uneven")
    record.hyperparameters(profile, log, train=len(data.train), test=len(data.test), steps=len(batches))
    past = Past(started)
    saved = checkpoints(learner, batches, past)
    progress = hora.track(batches, epochs=profile.epochs)
    pace = record.Pace(profile.log_every)
    for (samples,) in progress:
        first, last = (progress.step - 1) % len(batches) == 0, progress.step % len(batches) == 0
        if first:
            log.start("epoch_start", epoch_num=progress.epoch + 1)
        batch = data.train.batch(samples.tolist(), seed=profile.seed, epoch=progress.epoch)
        lr = learning_rate(profile, progress.step - 1, steps_per_epoch=len(batches))
        loss = learner.step(*learner.put(batch), lr=lr)
        pace.count(loss, samples=len(samples))
        if pace.due or last:
            values = pace.collect()
            check_finite(values.loss, step=progress.step, lr=lr)
            progress.log(loss=values.loss, lr=lr, samples_per_second_per_rank=values.rates)
        if last:
            log.stop("epoch_stop", epoch_num=progress.epoch + 1)
            before = time.perf_counter()
            log.start("eval_start", epoch_num=progress.epoch + 1)
            test_loss, past.accuracy = learner.evaluate(data.test, test)
            log.event("eval_accuracy", past.accuracy, epoch_num=progress.epoch + 1)
            log.stop("eval_stop", epoch_num=progress.epoch + 1)
            progress.log(kind="eval", loss=test_loss, accuracy=past.accuracy)
            pace.restart()
            past.evaluating += time.perf_counter() - before
            if past.accuracy >= profile.target and past.reached_at is None:
                past.reached_at = past.seconds
                log.stop("run_stop", status="success")
                log.close()  # training on belongs to no MLPerf run
                progress.note(
                    f"target reached after epoch {progress.epoch + 1}: "
                    f"accuracy {past.accuracy:.4f}, target {profile.target}"
                )
                if not profile.train_on:
                    break
        if saved is not None:
            saved.step()
    seconds = past.seconds
    if past.reached_at is None:
        log.stop("run_stop", status="aborted")
    return Outcome(
        reached=past.reached_at is not None,
        accuracy=past.accuracy,
        epochs=min(progress.epoch + 1, profile.epochs),  # none is left where a finished training is resumed
        steps=progress.step,
        time_to_train=seconds if past.reached_at is None else past.reached_at,
        samples_per_second=progress.step * profile.global_batch / (seconds - past.evaluating),
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


def check_finite(loss: float, *, step: int, lr: float) -> None:
    if not -float("inf") < loss < float("inf"):
        raise TrainingError(
            f"The loss up to step {step} is {loss}, at learning rate {lr:.4g}.",
            fix="Choose a lower one with --lr.",
        )


if __name__ == "__main__":
    main()

"""The training that all workloads share: schedule, evaluations, MLPerf's clock and log, records, checkpoints.

A workload gives data, model, loss, metric and targets as a :class:`Task`; when what happens is said here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import hora.torch as hora
from hora.core.errors import TrainingError
from hora.mlperf import MLPerfLog
from hora.workloads.pace import Pace
from hora.workloads.past import Past, checkpoints

__all__ = ["Length", "Outcome", "Task", "check_finite", "train"]


class Length(Protocol):
    """What the loop reads of a workload's profile."""

    @property
    def epochs(self) -> int:
        """How many at most."""
        ...

    @property
    def global_batch(self) -> int:
        """Samples per step of all workers."""
        ...

    @property
    def targets(self) -> Mapping[str, float]:
        """What one and the same evaluation has to reach, by kind."""
        ...

    @property
    def evaluate_from(self) -> int:
        """The first epoch, from 1, after which there is an evaluation."""
        ...

    @property
    def train_on(self) -> bool:
        """Finish the schedule although the targets are reached."""
        ...

    @property
    def log_every(self) -> int:
        """Steps between two records in metrics.jsonl."""
        ...

    @property
    def checkpoint_every(self) -> int | None:
        """Steps between checkpoints; None: only when the job is asked to stop."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a workload is, to the loop.

    Attributes:
        profile: how long it trains, to which targets.
        model: what is trained, kept in checkpoints.
        optimizer: of the model, kept in checkpoints.
        loader: of the training data.
        rate: the learning rate of a step, counted from 0.
        step: one training step on this worker's share; its mean losses, detached, among them ``loss``.
        evaluate: what an evaluation gave, the same on every rank; at least one value per target.
        score: these values as MLPerf's rules want them in ``eval_accuracy``.
        samples: how many of them a share has.
    """

    profile: Length
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: hora.Loader
    rate: Callable[[int], float]
    step: Callable[[Any, float, int], Mapping[str, torch.Tensor]]
    evaluate: Callable[[], Mapping[str, float]]
    score: Callable[[Mapping[str, float]], Any]
    samples: Callable[[Any], int]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended.

    Attributes:
        reached: whether one evaluation reached all targets.
        values: of the last evaluation.
        targets: that were to be reached, by kind.
        time_to_train: seconds from the first touch of the training data until the targets were known to be
            reached, or until the end of a training that did not reach them.
        samples_per_second: of all workers while they trained, evaluations left out.
    """

    reached: bool
    values: Mapping[str, float]
    targets: Mapping[str, float]
    epochs: int
    steps: int
    time_to_train: float
    samples_per_second: float

    @property
    def missed(self) -> list[str]:
        """A sentence for each target that the last evaluation did not reach; none where they were."""
        if self.reached:
            return []
        return [
            f"{kind} {self.values.get(kind, 0.0):.4f} is below {least}"
            for kind, least in self.targets.items()
            if self.values.get(kind, 0.0) < least
        ]


def train(task: Task, log: MLPerfLog, *, started: float) -> Outcome:
    """Train until an evaluation reaches the targets, or for all epochs. Every rank calls it.

    Where the run directory, or the one of ``--resume``, has a checkpoint, the training goes on from there.

    Args:
        task: what is trained.
        log: between ``run_start`` and ``run_stop``, which is written here.
        started: when training data was first touched, ``time.perf_counter()``.

    Raises:
        TrainingError: the loss became infinite or not a number.
    """
    profile, loader = task.profile, task.loader
    past = Past(started)
    saved = checkpoints(
        {"model": task.model, "optimizer": task.optimizer, "loader": loader, "past": past},
        every=profile.checkpoint_every,
    )
    progress = hora.track(loader, epochs=profile.epochs)
    pace = Pace(profile.log_every)
    for batch in progress:
        epoch = progress.epoch + 1
        if (progress.step - 1) % len(loader) == 0:
            log.start("epoch_start", epoch_num=epoch)
        last = progress.step % len(loader) == 0
        lr = task.rate(progress.step - 1)
        pace.count(task.step(batch, lr, progress.epoch), samples=task.samples(batch))
        if pace.due or last:
            losses, rates = pace.collect()
            check_finite(losses["loss"], step=progress.step, lr=lr)
            progress.log(**losses, lr=lr, samples_per_second_per_rank=rates)
        if last:
            log.stop("epoch_stop", epoch_num=epoch)
        if last and (epoch >= profile.evaluate_from or epoch == profile.epochs):
            before = time.perf_counter()
            log.start("eval_start", epoch_num=epoch)
            past.values = dict(task.evaluate())
            log.event("eval_accuracy", task.score(past.values), epoch_num=epoch)
            log.stop("eval_stop", epoch_num=epoch)
            progress.log(kind="eval", **past.values)
            pace.restart()
            past.evaluating += time.perf_counter() - before
            if past.reached_at is None and all(
                past.values[kind] >= least for kind, least in profile.targets.items()
            ):
                past.reached_at = past.seconds
                log.stop("run_stop", status="success")
                log.close()  # training on belongs to no MLPerf run
                said = ", ".join(
                    f"{kind} {past.values[kind]:.4f}, target {least}"
                    for kind, least in profile.targets.items()
                )
                progress.note(f"target reached after epoch {epoch}: {said}")
                if not profile.train_on:
                    break
        if saved is not None:
            saved.step()
    seconds = past.seconds
    if past.reached_at is None:
        log.stop("run_stop", status="aborted")
    return Outcome(
        reached=past.reached_at is not None,
        values=past.values,
        targets=profile.targets,
        epochs=min(progress.epoch + 1, profile.epochs),  # none is left where a finished training is resumed
        steps=progress.step,
        time_to_train=seconds if past.reached_at is None else past.reached_at,
        samples_per_second=progress.step * profile.global_batch / (seconds - past.evaluating),
    )


def check_finite(loss: float, *, step: int, lr: float) -> None:
    """Raise TrainingError where the mean loss over all ranks is infinite or not a number."""
    if not -float("inf") < loss < float("inf"):
        raise TrainingError(
            f"The loss up to step {step} is {loss}, at learning rate {lr:.4g}.",
            fix="Choose a lower one with --lr.",
        )

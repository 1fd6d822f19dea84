"""The training of a detector: until an evaluation reaches the targets, or for all epochs."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import hora.torch as hora
from hora.core.errors import TrainingError
from hora.workloads.scenes.batches import Prepared, collate
from hora.workloads.scenes.evaluate import evaluate
from hora.workloads.scenes.learner import Learner
from hora.workloads.scenes.sample import Pictures

__all__ = ["Outcome", "train"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended.

    Attributes:
        reached: whether one evaluation reached all targets.
        precision: of the last evaluation, by ``bbox`` and ``segm``, 0 to 1.
        seconds: from the start until the targets were known to be reached, or until the end.
    """

    reached: bool
    precision: Mapping[str, float]
    epochs: int
    steps: int
    seconds: float

    def missed(self, targets: Mapping[str, float]) -> list[str]:
        """A sentence for each target that the last evaluation did not reach."""
        return [
            f"{kind} {self.precision.get(kind, 0.0):.4f} is below {least}"
            for kind, least in targets.items()
            if self.precision.get(kind, 0.0) < least
        ]


def train(learner: Learner, train_pictures: Pictures, test_pictures: Pictures) -> Outcome:
    """Train and evaluate after each epoch. Every rank calls it, between ``init`` and ``shutdown``.

    Raises:
        TrainingError: the loss became infinite or not a number.
    """
    profile = learner.profile
    started = time.perf_counter()
    loader, test = loaders(learner, train_pictures, test_pictures)
    precision: dict[str, float] = {}
    reached_at: float | None = None
    progress = hora.track(loader, epochs=profile.epochs)
    losses: list[Mapping[str, torch.Tensor]] = []
    for batch in progress:
        lr = profile.schedule.at(progress.step - 1, steps_per_epoch=len(loader))
        losses.append(learner.step(batch, lr=lr, epoch=progress.epoch))
        last = progress.step % len(loader) == 0
        if last or len(losses) >= profile.log_every:
            values = means(losses)
            losses = []
            check_finite(values["loss"], step=progress.step, lr=lr)
            progress.log(**values, lr=lr)
        if last and (progress.epoch + 1 >= profile.evaluate_from or progress.epoch + 1 == profile.epochs):
            precision = evaluate(learner, test_pictures, test)
            progress.log(kind="eval", **precision)
            if reached_at is None and all(
                precision[kind] >= least for kind, least in profile.targets.items()
            ):
                reached_at = time.perf_counter() - started
                said = ", ".join(f"{kind} {value:.4f}" for kind, value in precision.items())
                progress.note(f"target reached after epoch {progress.epoch + 1}: {said}")
                if not profile.train_on:
                    break
    return Outcome(
        reached=reached_at is not None,
        precision=precision,
        epochs=min(progress.epoch + 1, profile.epochs),
        steps=progress.step,
        seconds=time.perf_counter() - started if reached_at is None else reached_at,
    )


def loaders(
    learner: Learner, train_pictures: Pictures, test_pictures: Pictures
) -> tuple[hora.Loader, hora.Loader]:
    """This rank's shares of the training and of the test batches, made in loader processes."""
    profile = learner.profile
    to_train, to_test = learner.transforms()
    masks = "segm" in profile.targets
    processes = profile.data.loaders
    together = functools.partial(collate, multiple=learner.multiple)
    loader = hora.data_loader(
        Prepared(train_pictures, to_train, masks=masks),
        global_batch=profile.global_batch,
        seed=profile.seed,
        num_workers=processes,
        collate_fn=together,
        persistent_workers=processes > 0,
    )
    test = hora.data_loader(
        Prepared(test_pictures, to_test, masks=False),
        global_batch=profile.eval_batch,
        shuffle=False,
        tail="uneven",
        num_workers=processes,
        collate_fn=together,
    )
    return loader, test


def means(losses: list[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Of each loss, over these steps and over the ranks, whose shares are equal."""
    return hora.mean(
        {name: torch.stack([each[name] for each in losses]).double().mean() for name in losses[0]}
    )


def check_finite(loss: float, *, step: int, lr: float) -> None:
    if not -float("inf") < loss < float("inf"):
        raise TrainingError(
            f"The loss up to step {step} is {loss}, at learning rate {lr:.4g}.",
            fix="Choose a lower one with --lr.",
        )

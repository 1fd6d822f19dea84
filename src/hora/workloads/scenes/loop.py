"""A detector's part of a training: its loaders, its rate, its evaluations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import hora.torch as hora
from hora.mlperf import MLPerfLog
from hora.workloads import loop, opening
from hora.workloads.loop import Outcome
from hora.workloads.scenes.batches import Prepared, collate
from hora.workloads.scenes.evaluate import evaluate
from hora.workloads.scenes.learner import Learner
from hora.workloads.scenes.sample import Pictures

__all__ = ["loaders", "score", "train"]


def train(
    learner: Learner, train_pictures: Pictures, test_pictures: Pictures, log: MLPerfLog, *, started: float
) -> Outcome:
    """Train to the targets on these pictures. See :func:`hora.workloads.loop.train`."""
    profile = learner.profile
    loader, test = loaders(learner, train_pictures, test_pictures)
    opening.hyperparameters(
        learner.hyperparameters(steps=len(loader)),
        log,
        seed=profile.seed,
        train=len(train_pictures),
        test=len(test_pictures),
    )
    return loop.train(
        loop.Task(
            profile=profile,
            model=learner.model,
            optimizer=learner.optimizer,
            loader=loader,
            rate=lambda step: profile.schedule.at(step, steps_per_epoch=len(loader)),
            step=lambda batch, lr, epoch: learner.step(batch, lr=lr, epoch=epoch),
            evaluate=lambda: evaluate(learner, test_pictures, test),
            score=score,
            samples=lambda batch: len(batch.numbers),
        ),
        log,
        started=started,
    )


def score(values: Mapping[str, float]) -> Any:
    """AP as MLPerf's rules want it: a number for boxes alone, or ``{"BBOX": ..., "SEGM": ...}``."""
    return {kind.upper(): value for kind, value in values.items()} if "segm" in values else values["bbox"]


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

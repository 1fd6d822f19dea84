"""The options of trainings of detectors, and what is said when one has ended."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import hora.torch as hora
from hora.core.errors import UsageError
from hora.workloads.scenes.config import Profile
from hora.workloads.scenes.loop import Outcome

__all__ = ["add", "changed", "tell"]

P = TypeVar("P", bound=Profile)


def add(parser: argparse.ArgumentParser, profiles: Mapping[str, Profile]) -> None:
    """Add the options. None means: as the profile says."""
    parser.add_argument("--profile", choices=profiles, default="quick", help="default: quick")
    parser.add_argument("--data", type=Path, metavar="PATH", help="COCO 2017's folder (reference profile)")
    parser.add_argument(
        "--backbone", type=Path, metavar="FILE", help="weights of a ResNet to start from (reference profile)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, order, augmentation and scenes")
    parser.add_argument("--epochs", type=int, metavar="N", help="how many at most")
    parser.add_argument("--pictures", type=int, metavar="N", help="training scenes in an epoch")
    parser.add_argument("--test-pictures", type=int, metavar="N", help="test scenes")
    parser.add_argument("--global-batch", type=int, metavar="N", help="pictures per step over all workers")
    parser.add_argument("--lr", type=float, metavar="X", help="default: grows with --global-batch")
    parser.add_argument("--loaders", type=int, metavar="N", help="processes per worker that make batches")
    parser.add_argument("--train-on", action="store_true", help="go on although the target is reached")


def changed(profile: P, arguments: argparse.Namespace) -> P:
    """The profile with what the options change.

    Raises:
        UsageError: a value out of its range.
    """
    for name in ("epochs", "pictures", "test_pictures", "global_batch", "seed", "loaders", "lr"):
        value, least = getattr(arguments, name), 0 if name in ("seed", "loaders", "lr") else 1
        if value is not None and not (value > 0 if name == "lr" else value >= least):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} is out of range.", fix=f"Leave {flag} out.")
    lr = profile.schedule.lr * (arguments.global_batch or profile.global_batch) / profile.global_batch
    scenes = _with(
        profile.data.scenes, train=arguments.pictures, test=arguments.test_pictures, seed=arguments.seed
    )
    data = _with(profile.data, path=arguments.data, loaders=arguments.loaders, scenes=scenes)
    return _with(
        profile,
        data=data,
        backbone=arguments.backbone,
        seed=arguments.seed,
        epochs=arguments.epochs,
        global_batch=arguments.global_batch,
        schedule=_with(profile.schedule, lr=lr if arguments.lr is None else arguments.lr),
        train_on=arguments.train_on,
    )


def tell(outcome: Outcome, profile: Profile) -> None:
    """Say how it went, on rank 0."""
    if hora.rank() != 0:
        return
    for kind, least in profile.targets.items():
        met = "reached" if outcome.precision[kind] >= least else "not reached"
        print(f"{kind} {outcome.precision[kind]:.4f}, target {least} {met}")
    print(f"time to train {outcome.seconds:.1f} s, {outcome.epochs} epochs, {outcome.steps} steps")


T = TypeVar("T")


def _with(thing: T, **values: object) -> T:
    return dataclasses.replace(  # type: ignore[type-var]
        thing, **{name: value for name, value in values.items() if value is not None}
    )

"""The options of trainings of detectors, read by the command line and by each worker alike."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from hora.core.errors import UsageError
from hora.workloads.limits import check_batch
from hora.workloads.scenes.config import Profile

__all__ = ["Options"]

P = TypeVar("P", bound=Profile)
T = TypeVar("T")

LEAST = {
    **dict.fromkeys(("epochs", "pictures", "test_pictures", "global_batch", "checkpoint_every"), 1),
    **dict.fromkeys(("seed", "loaders"), 0),
}
NAMES = ("profile", "data", "backbone", "lr", "target", *LEAST)


class Options(Generic[P]):
    """The options of one detector.

    Args:
        profiles: what ``--profile`` chooses from, by name; all have targets of the same kinds.
    """

    def __init__(self, profiles: Mapping[str, P]) -> None:
        self._profiles = profiles
        self._kinds = tuple(profiles["quick"].targets)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the options. None means: as the profile says."""
        add = parser.add_argument
        add(
            "--profile",
            choices=self._profiles,
            default="quick",
            help="what is trained to which target (default: quick)",
        )
        add("--data", type=Path, metavar="PATH", help="COCO 2017's folder (reference profile)")
        add(
            "--backbone",
            type=Path,
            metavar="FILE",
            help="weights of a ResNet to start from (reference profile)",
        )
        add("--seed", type=int, metavar="N", help="of weights, order, augmentation and scenes")
        add("--epochs", type=int, metavar="N", help="how many at most")
        add("--pictures", type=int, metavar="N", help="training scenes in an epoch")
        add("--test-pictures", type=int, metavar="N", help="test scenes")
        add("--global-batch", type=int, metavar="N", help="pictures per step over all workers")
        add("--lr", type=float, metavar="X", help="peak learning rate; default: grows with --global-batch")
        add(
            "--target",
            type=float,
            nargs=len(self._kinds),
            metavar=tuple(kind.upper() for kind in self._kinds),
            help="average precision, 0 to 1",
        )
        add("--train-on", action="store_true", help="finish the schedule although the target is reached")
        add(
            "--checkpoint-every",
            type=int,
            metavar="N",
            help="steps between checkpoints; default: only when the job is asked to stop",
        )
        add("--loaders", type=int, metavar="N", help="processes per worker that make batches")

    def profile(self, arguments: argparse.Namespace) -> P:
        """The chosen profile with what the options change.

        Raises:
            UsageError: a value out of its range.
        """
        for name, least in LEAST.items():
            value = getattr(arguments, name)
            _check(name, value, value is None or value >= least)
        _check("lr", arguments.lr, arguments.lr is None or 0 < arguments.lr < float("inf"))
        for value in arguments.target or ():
            _check("target", value, 0 <= value <= 1)
        chosen = self._profiles[arguments.profile]
        lr = chosen.schedule.lr * (arguments.global_batch or chosen.global_batch) / chosen.global_batch
        scenes = _with(
            chosen.data.scenes, train=arguments.pictures, test=arguments.test_pictures, seed=arguments.seed
        )
        return _with(
            chosen,
            data=_with(chosen.data, path=arguments.data, loaders=arguments.loaders, scenes=scenes),
            backbone=arguments.backbone,
            seed=arguments.seed,
            epochs=arguments.epochs,
            global_batch=arguments.global_batch,
            schedule=_with(chosen.schedule, lr=lr if arguments.lr is None else arguments.lr),
            targets=None
            if arguments.target is None
            else dict(zip(self._kinds, arguments.target, strict=True)),
            train_on=arguments.train_on,
            checkpoint_every=arguments.checkpoint_every,
        )

    def check(self, chosen: Profile, *, workers: int) -> None:
        """Find what cannot work before a worker is started.

        Raises:
            DataError: pictures that are missing or damaged.
            GlobalBatchError: a global batch that does not fit the workers or the pictures.
        """
        from hora.workloads.scenes.data import load  # numpy: not for --help

        train, _ = load(chosen.data)
        check_batch(chosen.global_batch, workers=workers, samples=len(train), noun="picture")

    def words(self, arguments: argparse.Namespace) -> list[str]:
        """The options as words of a command line, for the workers."""
        given: list[str] = []
        for name in NAMES:
            value = getattr(arguments, name)
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            given.append("--" + name.replace("_", "-"))
            given += [str(each.absolute() if isinstance(each, Path) else each) for each in values]
        return [*given, "--train-on"] if arguments.train_on else given


def _check(name: str, value: object, good: bool) -> None:
    if not good:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} {value} is out of range.", fix=f"Leave {flag} out for the profile's own.")


def _with(thing: T, **values: object) -> T:
    return dataclasses.replace(  # type: ignore[type-var]
        thing, **{name: value for name, value in values.items() if value is not None}
    )

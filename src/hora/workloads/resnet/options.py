"""The options of ``hora train resnet``, read by the command line and by each worker alike."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from hora.core.errors import DataError, UsageError
from hora.workloads.limits import check_batch
from hora.workloads.resnet.config import PROFILES, OptimizerConfig, Profile

__all__ = ["add", "check", "profile", "words"]

OPTIONS = (
    *("profile", "data", "seed", "epochs", "global_batch", "optimizer", "lr", "precision", "target"),
    *("calibration", "image_size", "width", "checkpoint_every"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options. None means: as the profile says."""
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default="quick",
        help="what is trained to which target (default: quick)",
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help="directory of the images")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the weights, the order and the augmentation"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="length of the schedule")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples per step over all workers")
    parser.add_argument("--optimizer", choices=["sgd", "lars"], help="default: sgd")
    parser.add_argument(
        "--lr", type=float, metavar="X", help="peak learning rate; default: grows with --global-batch"
    )
    parser.add_argument(
        "--precision",
        choices=["auto", "bfloat16", "float32", "float64"],
        help="of the convolutions; auto: bfloat16 where the hardware multiplies it",
    )
    parser.add_argument("--target", type=float, metavar="X", help="top-1 accuracy, 0 to 1")
    parser.add_argument(
        "--train-on", action="store_true", help="finish the schedule although the target is reached"
    )
    parser.add_argument(
        "--calibration", type=float, metavar="S", help="seconds to measure the scaling factor; 0: do not"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="steps between checkpoints; default: only when the job is asked to stop",
    )
    parser.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="side of the images (reference profile)"
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="channels of the first stage, doubled in each later"
    )


def profile(arguments: argparse.Namespace) -> Profile:
    """The chosen profile with what the options change.

    Raises:
        UsageError: a value out of its range.
    """
    for name in ("epochs", "global_batch", "image_size", "width", "checkpoint_every"):
        _check(name, getattr(arguments, name), low=1)
    _check("seed", arguments.seed, low=0, high=2**63 - 1)
    _check("target", arguments.target, low=0.0, high=1.0)
    _check("calibration", arguments.calibration, low=0.0, high=3600.0)
    chosen = PROFILES[arguments.profile]
    data = dataclasses.replace(chosen.data, path=arguments.data)
    if arguments.image_size is not None:
        data = dataclasses.replace(data, image_size=arguments.image_size)
    if arguments.calibration is not None:
        chosen = dataclasses.replace(chosen, calibration_seconds=arguments.calibration)
    model = chosen.model
    if arguments.width is not None:
        widths = tuple(arguments.width * 2**stage for stage in range(len(model.widths)))
        model = dataclasses.replace(model, stem_width=arguments.width, widths=widths)
    changed = {
        name: value
        for name in ("seed", "epochs", "global_batch", "precision", "target", "checkpoint_every")
        if (value := getattr(arguments, name)) is not None
    }
    return dataclasses.replace(
        chosen,
        data=data,
        model=model,
        optimizers=(_optimizer(chosen, arguments),),
        train_on=arguments.train_on,
        **changed,
    )


def words(arguments: argparse.Namespace) -> list[str]:
    """The options as words of a command line, for the workers."""
    given = []
    for name in OPTIONS:
        value = getattr(arguments, name)
        if value is not None:
            given += [
                "--" + name.replace("_", "-"),
                str(value.absolute() if isinstance(value, Path) else value),
            ]
    return [*given, "--train-on"] if arguments.train_on else given


def check(chosen: Profile, *, workers: int) -> None:
    """Find what cannot work before a worker is started.

    Raises:
        DataError: images that are missing, damaged, too few, or of more classes than the model has.
        GlobalBatchError: a global batch that does not fit the workers or the images.
    """
    from hora.workloads.resnet.data import load  # numpy: not for --help

    data = load(chosen.data)
    check_batch(chosen.global_batch, workers=workers, samples=len(data.train), noun="image")
    if len(data.train.classes) > chosen.model.classes:
        raise DataError(
            f"{data.origin} has {len(data.train.classes)} classes; the model has {chosen.model.classes}.",
            fix="Give a tree with as many classes at most with --data PATH.",
        )


def _optimizer(chosen: Profile, arguments: argparse.Namespace) -> OptimizerConfig:
    name = arguments.optimizer or chosen.optimizer.name
    config = next(config for config in chosen.optimizers if config.name == name)
    if arguments.lr is not None:
        if not 0 < arguments.lr < float("inf"):
            raise UsageError(f"--lr {arguments.lr} is not a learning rate.", fix=f"Write --lr {config.lr}.")
        return dataclasses.replace(config, lr=arguments.lr)
    if arguments.global_batch is None:
        return config
    # Linear scaling (P. Goyal et al., arXiv:1706.02677), in the steps of 0.001 that MLPerf's rules take.
    lr = max(1, round(1000 * config.lr * arguments.global_batch / chosen.global_batch)) / 1000
    return dataclasses.replace(config, lr=lr)


def _check(name: str, value: float | None, *, low: float, high: float | None = None) -> None:
    if value is None or (low <= value and (high is None or value <= high)):
        return
    flag = "--" + name.replace("_", "-")
    limits = f"at least {low}" if high is None else f"{low} to {high}"
    raise UsageError(
        f"{flag} {value} is out of range: it takes {limits}.", fix=f"Leave {flag} out for the profile's own."
    )

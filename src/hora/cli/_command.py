"""What ``hora run``, ``hora train`` and ``hora verify`` share: flags, their values, the command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hora.core.errors import LaunchError

if TYPE_CHECKING:
    from hora.launch import Target

__all__ = [
    "add_command",
    "add_survival",
    "checkpoint_variables",
    "command_of",
    "environment_of",
    "path",
    "restarts",
    "seconds",
    "target_of",
    "workers",
]


def add_command(parser: argparse.ArgumentParser, verb: str) -> None:
    """The flags about the command, and the command itself, which takes everything that follows."""
    parser.usage = (
        f"hora {verb} [-n N] [options] script.py [arguments ...]\n"
        f"       hora {verb} [-n N] [options] -m module [arguments ...]"
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the name that follows is a module, as for python -m"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable for the workers; may be repeated",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py [arguments ...]",
        help="what every worker runs; everything after it belongs to it",
    )


def command_of(arguments: argparse.Namespace, verb: str) -> list[str]:
    """The script or module and its arguments.

    Raises:
        LaunchError: there is none.
    """
    command = list(arguments.command)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise LaunchError(f"There is nothing to {verb}.", fix=f"Write for example: hora {verb} -n 2 train.py")
    return command


def target_of(arguments: argparse.Namespace, name: str) -> Target:
    """What every worker runs."""
    from hora.launch import ModuleTarget, ScriptTarget

    return ModuleTarget(name) if arguments.module else ScriptTarget(name)


def environment_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables given by ``--env``.

    Raises:
        LaunchError: one that is not of the form K=V.
    """
    found = {}
    for text in arguments.env:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise LaunchError(
                f"--env {text}: that is not of the form K=V.", fix=f"Write --env {key or 'KEY'}=VALUE."
            )
        found[key] = value
    return found


def workers(text: str) -> int:
    """The number given by ``-n``."""
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"-n {text}: that is not a number of workers.", fix="Write for example -n 2."
        ) from None


def path(text: str, flag: str = "--run-dir") -> Path:
    """The path given by a flag."""
    if not text:
        raise LaunchError(f"{flag} is empty.", fix=f"Write for example {flag} runs/first.")
    return Path(text)


def seconds(flag: str, text: str | None) -> float | None:
    """The time given by a flag; None where it was left out."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise LaunchError(
            f"{flag} {text}: that is not a number of seconds.", fix=f"Write {flag} 3600."
        ) from None


def add_survival(parser: argparse.ArgumentParser) -> None:
    """The flags about checkpoints, and about starting again."""
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="directory of checkpoints, kept over runs; default: HORA_CHECKPOINTS, else in the run directory",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="where there is no checkpoint yet, go on from those of this run, or in this directory",
    )
    parser.add_argument(
        "--restarts",
        metavar="K",
        help="start all workers again up to K times after a failure, in the same run directory; default: 0",
    )


def restarts(text: str | None) -> int:
    """The number given by ``--restarts``; 0 where it was left out."""
    if text is None:
        return 0
    if not text.isdecimal():
        raise LaunchError(f"--restarts {text}: that is no number of restarts.", fix="Write --restarts 3.")
    return int(text)


def checkpoint_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Where checkpoints are, for the ranks; absolute, as a rank may change its folder."""
    found = {}
    if arguments.checkpoints is not None:
        found["HORA_CHECKPOINTS"] = str(path(arguments.checkpoints, "--checkpoints").absolute())
    if arguments.resume is not None:
        resume = path(arguments.resume, "--resume").absolute()
        if not resume.is_dir():
            raise LaunchError(
                f"--resume {arguments.resume}: there is no such directory.",
                fix="Give the run directory that a run printed at its start, or a directory of checkpoints.",
            )
        found["HORA_RESUME"] = str(resume)
    return found

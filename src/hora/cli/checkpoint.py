"""``hora checkpoint list|check|export``: look at checkpoints, verify them, and take one out as a file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hora.core import commits
from hora.core.errors import CheckpointError


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="list|check|export", required=True)
    listed = actions.add_parser("list", help="the checkpoints of a directory; only their markers are read")
    checked = actions.add_parser("check", help="read every byte, and say which checkpoints are whole")
    exported = actions.add_parser(
        "export", help="write one checkpoint as a plain state_dict, or as safetensors"
    )
    for sub in (listed, checked, exported):
        sub.add_argument(
            "directory",
            type=Path,
            metavar="DIR",
            help="a directory of checkpoints, a run directory, or one checkpoint",
        )
    exported.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: model-STEP.pt beside where you are"
    )
    exported.add_argument(
        "--format",
        choices=("pt", "safetensors"),
        help="default: by the end of FILE's name, else pt",
    )
    exported.add_argument(
        "--key",
        metavar="NAME",
        help="which object of the state; default: the only module. --key all writes everything (pt only)",
    )


def main(arguments: argparse.Namespace) -> int:
    """0; 1 when something is damaged."""
    places = _places(arguments.directory)
    if arguments.action == "export":
        return _export(arguments)
    if not places:
        print(f"hora: there are no checkpoints in {arguments.directory}", file=sys.stderr)
        return 1
    damaged = 0
    for place in places:
        try:
            commit = commits.read(place)
            problem = commits.problem_of(place.path, commit) if arguments.action == "check" else None
        except (commits.DamagedError, OSError) as error:
            commit, problem = None, str(error)
        damaged += problem is not None
        print(_line(place.path.name, commit, problem, whole=arguments.action == "check"))
    return int(damaged > 0 and arguments.action == "check")


def _places(directory: Path) -> list[commits.Place]:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory.",
            fix="Give a directory of checkpoints, or a run directory such as runs/train-1.",
        )
    here = commits.place_at(directory)
    if here is not None:
        return [here]
    inside = directory / "checkpoints"
    return commits.places(inside if inside.is_dir() else directory)


def _line(name: str, commit: commits.Commit | None, problem: str | None, *, whole: bool) -> str:
    if commit is None:
        return f"{name:<22} {problem}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.time))
    workers = f"{commit.world} worker{'s' if commit.world != 1 else ''}"
    end = problem or ("whole" if whole else "")
    return f"{name:<22} {when}  {commit.bytes / 2**20:9.1f} MB  {workers:<11} {end}".rstrip()


def _export(arguments: argparse.Namespace) -> int:
    from hora.torch.checkpoint import export

    places = _places(arguments.directory)
    output = export.export(
        places, output=arguments.output, form=arguments.format, key=arguments.key, say=_say
    )
    print(output)
    return 0


def _say(text: str) -> None:
    print(f"hora: {text}", file=sys.stderr)

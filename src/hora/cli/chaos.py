"""``hora chaos``: is a job's result the same when ranks are killed, disks are full, networks are cut?"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hora.cli._command import path, seconds
from hora.core.errors import ChaosError, LaunchError

if TYPE_CHECKING:
    from hora.chaos.schedule import Kind, Moment

KINDS: dict[Kind, str] = {
    "kill": "kill a rank (SIGKILL)",
    "stop": "stop a rank for good (SIGSTOP)",
    "delay": "stop a rank, and let it go on after 0.3 to 3 s",
    "disconnect": "cut a rank's TCP connections for 0.3 to 3 s; needs HORA_ENGINE=gloo",
    "fill-disk": "fill the disk of the run directory, a small one made for that, for 0.3 to 3 s or more",
    "corrupt-checkpoint": "damage the newest checkpoint, and kill a rank",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb; those behind ``--`` are the command of the job."""
    parser.usage = (
        "hora chaos [--seed S] [--kill N] [--stop N] [...] -- hora run [options] script.py [arguments ...]"
    )
    parser.epilog = "The exit code is 0 when the results are the same, 1 when not, 2 when it cannot be tried."
    parser.allow_abbrev = False
    parser.add_argument("--seed", metavar="S", help="of the schedule; default: drawn, and told")
    for kind, text in KINDS.items():
        parser.add_argument(f"--{kind}", metavar="N", default="0", help=f"so many times: {text}")
    parser.add_argument(
        "--at",
        metavar="MOMENTS",
        help="draw these moments only, with commas in between: start, init, step, save, last, again (soon "
        "after another); default: all",
    )
    parser.add_argument(
        "--reference", metavar="RUN", help="undisturbed run to compare with; default: it is made first"
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        default="0",
        help="largest relative difference of a metric or tensor; default: 0, every bit",
    )
    parser.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="a metric not to compare; may be repeated",
    )
    parser.add_argument(
        "--run-dir", metavar="D", help="run directory to make; default: runs/chaos-NAME-DATE-TIME"
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        help="stop the disturbed run after S seconds; default: ten times the undisturbed one, and 120",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- hora run ...", help="the job")


def main(arguments: argparse.Namespace) -> int:
    """0 when the disturbed run has the result of the undisturbed one, 1 when not."""
    from hora.chaos.survival import Question, survive
    from hora.core.rundir import RunDirectory, default_path

    command = _command(list(arguments.command))
    job = _parsed(command)
    counts = {kind: _whole(f"--{kind}", getattr(arguments, kind.replace("-", "_"))) for kind in KINDS}
    _check(job, counts)
    seed = random.randrange(10**6) if arguments.seed is None else _whole("--seed", arguments.seed)
    moments = _moments(arguments.at)
    timeout = seconds("--timeout", arguments.timeout)
    tolerance = _tolerance(arguments.tolerance)
    title = f"chaos-{_name(job)}"
    folder = path(arguments.run_dir) if arguments.run_dir is not None else default_path(title)
    run = RunDirectory.create(
        folder, about={"name": title, "command": ["hora", *command], "seed": seed, "start": time.time()}
    )
    print(f"hora: chaos with seed {seed}, run directory {folder}", file=sys.stderr)
    report = survive(
        Question(
            command=command,
            folder=run.path,
            seed=seed,
            counts=counts,
            moments=moments,
            reference=None if arguments.reference is None else Path(arguments.reference),
            tolerance=tolerance,
            ignore=frozenset(arguments.ignore),
            timeout=timeout,
            reads_checkpoints=_number(job, "restarts") > 0,
        ),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report.write()
    run.describe(ended=time.time(), exit_code=0 if report.same else 1)
    print(*report.lines(), sep="\n")
    return 0 if report.same else 1


def _command(words: list[str]) -> list[str]:
    """``run`` or ``train`` and what follows."""
    words = words[words[:1] == ["--"] :]
    if words[1:3] == ["-m", "hora"]:
        words = words[2:]
    if len(words) < 2 or Path(words[0]).name != "hora" or words[1] not in ("run", "train"):
        raise ChaosError(
            f"{' '.join(words) or 'Nothing'} is not a job that can be disturbed.",
            fix="Write for example: hora chaos --kill 2 -- hora run -n 2 --restarts 5 train.py",
        )
    return words[1:]


def _parsed(command: list[str]) -> argparse.Namespace:
    """The job's own flags, read as the verb reads them."""
    from hora.cli import run, train

    verb, *rest = command
    parser = argparse.ArgumentParser(prog=f"hora {verb}")
    (run if verb == "run" else train).configure(parser)
    return parser.parse_args(rest)


def _check(job: argparse.Namespace, counts: dict[Kind, int]) -> None:
    """Refuse what cannot work, or would show nothing."""
    if not any(counts.values()):
        raise ChaosError("Nothing is to be done to the job.", fix="Write for example --kill 2.")
    flag = next((name for name in ("run_dir", "checkpoints", "resume") if getattr(job, name, None)), None)
    named = "--" + flag.replace("_", "-") if flag is not None else ""
    named = named or next((name for name in ("HORA_CHECKPOINTS", "HORA_RESUME") if os.environ.get(name)), "")
    if named:
        raise ChaosError(
            f"With {named} the disturbed run would find what the undisturbed one has left there.",
            fix=f"Leave out {named}: each run gets a directory of its own.",
        )
    deadly = [kind for kind in ("kill", "stop", "corrupt-checkpoint") if counts[kind]]
    if deadly and not _number(job, "restarts") and getattr(job, "min_workers", None) is None:
        raise ChaosError(
            f"--{deadly[0]} ends the job, as nothing starts its ranks again.",
            fix="Write hora run --restarts 10 ..., or --min-workers 1 for an elastic training.",
        )
    given = [text.partition("=") for text in getattr(job, "env", [])]
    engine = {key: value for key, _, value in given}.get("HORA_ENGINE", os.environ.get("HORA_ENGINE"))
    if counts["disconnect"] and engine != "gloo":
        raise ChaosError(
            "The ranks of one host exchange data through shared memory: there is no connection to cut.",
            fix="Set HORA_ENGINE=gloo, so that they use TCP as they would over several hosts.",
        )


def _number(job: argparse.Namespace, name: str) -> int:
    text = str(getattr(job, name, None) or "")
    return int(text) if text.isdigit() else 0


def _name(job: argparse.Namespace) -> str:
    words = list(getattr(job, "command", [])) or [getattr(job, "workload", "job")]
    return Path(next(word for word in words if word != "--")).stem


def _moments(text: str | None) -> tuple[Moment, ...]:
    from hora.chaos.schedule import MOMENTS

    if text is None:
        return MOMENTS
    chosen = text.split(",")
    unknown = [word for word in chosen if word not in MOMENTS]
    if unknown:
        raise ChaosError(
            f"--at {unknown[0]}: there is no such moment.", fix=f"Choose of {', '.join(MOMENTS)}."
        )
    return tuple(moment for moment in MOMENTS if moment in chosen)


def _whole(flag: str, text: str) -> int:
    if not text.isdigit():
        raise ChaosError(f"{flag} {text}: that is not a whole number.", fix=f"Write for example {flag} 2.")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise LaunchError(f"--tolerance {text}: that is not between 0 and 1.", fix="Write --tolerance 1e-6.")
    return value

"""``hora verify``: does a script train the same model with N workers as with one?"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from hora.cli._command import (
    add_command,
    command_of,
    environment_of,
    path,
    seconds,
    target_of,
    workers,
)
from hora.core.errors import VerifyError


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb; those behind the script are the script's own."""
    parser.epilog = "The exit code is 0 when they train the same, 1 when not, 2 when they cannot be compared."
    parser.add_argument(
        "-n", "-np", "--workers", default="2", metavar="N", help="workers to compare with one; default: 2"
    )
    parser.add_argument(
        "--steps", default="20", metavar="K", help="stop after K optimizer steps; default: 20"
    )
    parser.add_argument(
        "--float64", action="store_true", help="compute in float64, with a tolerance that leaves no doubt"
    )
    parser.add_argument(
        "--per-worker-batch",
        action="store_true",
        help="accept that the global batch grows with the workers; all else is still judged",
    )
    parser.add_argument(
        "--horovod", action="store_true", help="as for hora run: `import horovod.torch` gives Hora"
    )
    parser.add_argument(
        "--run-dir", metavar="D", help="run directory to make; default: runs/verify-NAME-DATE-TIME"
    )
    parser.add_argument("--timeout", default="600", metavar="S", help="seconds for each run; default: 600")
    add_command(parser, "verify")


def main(arguments: argparse.Namespace) -> int:
    """0 when N workers train what one worker trains, 1 when not."""
    from hora.core.rundir import RunDirectory, default_path
    from hora.launch.job import Job, check
    from hora.verify import Question, verify

    command = command_of(arguments, "verify")
    number = workers(arguments.workers)
    if number == 1:
        raise VerifyError("-n 1 compares one worker with itself.", fix="Write for example -n 2.")
    steps = _steps(arguments.steps)
    name, *rest = command
    target = target_of(arguments, name)
    env = environment_of(arguments)
    if arguments.horovod:
        from hora.launch import horovod

        env |= horovod.environment({**os.environ, **env})
    timeout = seconds("--timeout", arguments.timeout) or 600.0
    check(Job(target=target, arguments=rest, workers=number, env=env, timeout=timeout))
    title = f"verify-{target.stem}"
    folder = path(arguments.run_dir) if arguments.run_dir is not None else default_path(title)
    run = RunDirectory.create(
        folder, about={"name": title, "command": command, "workers": number, "start": time.time()}
    )
    print(f"hora: {name} with 1 and with {number} workers, run directory {folder}", file=sys.stderr)
    report = verify(
        Question(
            target=target,
            arguments=rest,
            workers=number,
            steps=steps,
            folder=Path(run.path),
            float64=arguments.float64,
            per_worker_batch=arguments.per_worker_batch,
            env=env,
            timeout=timeout,
        ),
        say=lambda line: print(line, file=sys.stderr),
    )
    report.write()
    run.describe(ended=time.time(), exit_code=0 if report.equal else 1)
    print(*report.lines(), sep="\n")
    return 0 if report.equal else 1


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise VerifyError(
            f"--steps {text}: that is not a number of steps.", fix="Write for example --steps 20."
        )
    return int(text)

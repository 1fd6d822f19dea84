"""``hora run``: start a script on N workers and bring back how they ended."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.cli._command import (
    add_command,
    add_survival,
    checkpoint_variables,
    command_of,
    environment_of,
    path,
    restarts,
    seconds,
    target_of,
)
from hora.cli._elastic_flags import hosts_of, hosts_variables, how_many
from hora.core.errors import HoraError, LaunchError
from hora.core.rundir import replace_text

if TYPE_CHECKING:
    from hora.core.rundir import RunDirectory

MOST_METRICS_MB, MOST_TIMELINE_MB = 2, 1
"""What a report reads in a quarter of a second each. With more metrics it is left to ``hora report``, and
with more of a timeline its picture is: nobody shall wait for the end of a run."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb; those behind the script are the script's own."""
    parser.add_argument(
        "-n",
        "-np",
        "--workers",
        metavar="N",
        help="number of workers; default: 1, or with --max-workers as many as that",
    )
    parser.add_argument(
        "--horovod",
        action="store_true",
        help="run a Horovod script unchanged: `import horovod.torch` gives Hora",
    )
    parser.add_argument("--run-dir", metavar="D", help="run directory to make; default: runs/NAME-DATE-TIME")
    parser.add_argument(
        "--hosts",
        metavar="H:N,...",
        help="how many workers each host has, as localhost:2,b:2; others are started through ssh",
    )
    parser.add_argument(
        "--remote-shell",
        metavar="CMD",
        help="how to start something on another host, {host}; default: HORA_REMOTE_SHELL, else ssh",
    )
    parser.add_argument(
        "--network",
        metavar="NET",
        help="what workers on several hosts talk over, as 10.0.0.0/24 or eth0; default: HORA_NETWORK, else "
        "the first network that they share",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE.json",
        help="what hora plan --json said; the report shows it beside what happened",
    )
    add_survival(parser)
    parser.add_argument("--name", help="name of the run; default: the name of the script")
    parser.add_argument(
        "--output-rank-prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put [rank] in front of each line on the console; default: yes",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show only failures; the logs in the run directory are complete"
    )
    parser.add_argument(
        "--timeout", metavar="S", help="stop the job after S seconds (exit code 124); default: never"
    )
    parser.add_argument(
        "--guard",
        choices=("on", "strict", "off"),
        help="watch the ranks; on: each new kind of collective is compared before it starts; strict: every "
        "one; default: HORA_GUARD, else on",
    )
    parser.add_argument(
        "--stall-after",
        metavar="S",
        help="name a rank that others have waited for S seconds; default: HORA_STALL_AFTER, else 30",
    )
    parser.add_argument(
        "--stall-abort",
        metavar="S",
        help="stop the job when they have waited S seconds; default: HORA_STALL_ABORT, else HORA_TIMEOUT",
    )
    elastic = parser.add_argument_group("elastic jobs, whose workers may come and go")
    elastic.add_argument(
        "--min-workers", metavar="N", help="go on without workers that failed, while there are so many"
    )
    elastic.add_argument("--max-workers", metavar="N", help="take in new workers, up to so many; default: -n")
    elastic.add_argument(
        "--hosts-from",
        metavar="PROGRAM",
        help="asked each second for lines HOST:SLOTS, which say how many workers each host has",
    )
    elastic.add_argument(
        "--elastic-timeout", metavar="S", help="wait so long for --min-workers workers; default: 600"
    )
    elastic.add_argument(
        "--reset-limit", metavar="N", help="give up when workers have been lost more often; default: never"
    )
    elastic.add_argument(
        "--cooldown",
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds for which a host that keeps failing gets no workers; default: 1 60",
    )
    add_command(parser, "run")


def main(arguments: argparse.Namespace) -> int:
    """The job's exit code: 0, or the first failing rank's; 1 too when a workload missed its target."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before the ranks were started, or after they had ended
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from hora.launch import Job, run_job
    from hora.workloads.summary import missed

    command = command_of(arguments, "run")
    name, *rest = command
    target = target_of(arguments, name)
    env = environment_of(arguments) | _guard_variables(arguments) | checkpoint_variables(arguments)
    env |= hosts_variables(arguments)
    title = None
    if arguments.horovod:
        from hora.launch import horovod

        for line in horovod.explain({**os.environ, **env}):
            print(f"hora: {line}", file=sys.stderr)
        env |= horovod.environment({**os.environ, **env})
        if not arguments.module and not name.endswith(".py") and not Path(name).exists():
            target, rest, title = horovod.target(command)
    spread = hosts_of(arguments.hosts, arguments.workers) if arguments.hosts else []
    count, elastic = how_many(arguments, arguments.workers)
    if spread and elastic is not None:
        raise LaunchError(
            "--hosts fixes how many workers each host has, and this job is elastic.",
            fix="Write --hosts-from PROGRAM, which prints a line HOST:SLOTS for each host.",
        )
    job = Job(
        target=target,
        arguments=rest,
        workers=sum(slots for _, slots in spread) or count,
        elastic=elastic,
        hosts=spread,
        env=env,
        run_dir=_run_dir_setting() if arguments.run_dir is None else path(arguments.run_dir),
        prefix=arguments.output_rank_prefix,
        quiet=arguments.quiet,
        name=title if arguments.name is None else arguments.name,
        timeout=seconds("--timeout", arguments.timeout),
        restarts=restarts(arguments.restarts),
    )
    plan = _plan(arguments)
    result = run_job(job)
    if plan is not None:
        replace_text(result.run.path / "plan.json", plan)
    if result.exit_code:
        # Why it failed is on the screen by now, and stays the last thing there.
        with contextlib.suppress(HoraError):
            _write_report(result.run)
        return result.exit_code
    summary: dict[str, Any] = {}
    try:
        told = _write_report(result.run)
        summary = result.run.about().get("summary") or {}
    except HoraError as error:
        told = f"the run directory is incomplete: {error}"
    if told is not None and not arguments.quiet:
        print(f"hora: {told}", file=sys.stderr)
    sentence = missed(summary)
    if sentence is not None:
        print(f"hora: {sentence}", file=sys.stderr)
        return 1
    return 0


def _plan(arguments: argparse.Namespace) -> str | None:
    if arguments.plan is None:
        return None
    from hora.report import checked_plan

    return checked_plan(arguments.plan)


def _write_report(run: RunDirectory) -> str | None:
    """Write the report of a run that has metrics; what to say about it, None without metrics.

    Raises:
        HoraError: it cannot be written.
    """
    size = run.metrics.stat().st_size if run.metrics.is_file() else 0
    if not size and not (run.path / "plan.json").is_file():
        return None
    if size > MOST_METRICS_MB * 2**20:
        return f"for a report write: hora report {_shown(run.path)}"
    from hora.report import write_report

    return f"report {_shown(write_report(run, most_timeline_mb=MOST_TIMELINE_MB))}"


def _shown(path: Path) -> Path:
    """Relative to where the user is, when it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _guard_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The guard's settings, which the ranks need too."""
    found = {} if arguments.guard is None else {"HORA_GUARD": arguments.guard}
    for flag, variable in (("--stall-after", "HORA_STALL_AFTER"), ("--stall-abort", "HORA_STALL_ABORT")):
        value = seconds(flag, getattr(arguments, flag[2:].replace("-", "_")))
        if value is not None and not 0 < value < math.inf:
            raise LaunchError(
                f"{flag} {value:g}: that is not a positive number of seconds.", fix=f"Write {flag} 60."
            )
        if value is not None:
            found[variable] = repr(value)
    return found


def _run_dir_setting() -> Path | None:
    """HORA_RUN_DIR as the user set it; inside a rank of another job it is that job's."""
    text = os.environ.get("HORA_RUN_DIR")
    return Path(text) if text and "HORA_JOB" not in os.environ else None

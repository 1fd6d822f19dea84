"""``hora train WORKLOAD``: train a workload to its target and report how it went."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hora.cli._command import add_survival, checkpoint_variables, restarts
from hora.core.errors import HoraError, MissingExtraError
from hora.workloads.registry import WORKLOADS, Workload, default_workers


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the workloads, each with its own options."""
    parser.epilog = "`hora train WORKLOAD --help` lists the options of a workload."
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, workload in WORKLOADS.items():
        sub = workloads.add_parser(
            name, help=workload.title, description=f"{workload.title}. {workload.data}."
        )
        sub.add_argument(
            "-n", "--workers", type=int, metavar="N", help="default: one per core, as the batch allows"
        )
        sub.add_argument("--run-dir", type=Path, metavar="D", help="default: runs/WORKLOAD-DATE-TIME")
        add_survival(sub)
        workload.options().add(sub)


def main(arguments: argparse.Namespace) -> int:
    """Train; 0 when the target was reached, 1 when not, the failing rank's code when the job failed.

    Raises:
        HoraError: the options, the data or the machine do not allow it, or no report can be written.
    """
    from hora.core import settings
    from hora.launch import Job, ModuleTarget, run_job
    from hora.launch.job import check_workers, cores
    from hora.report import write_report
    from hora.workloads.summary import missed, table

    workload = WORKLOADS[arguments.workload]
    _check_extras(workload)
    options = workload.options()
    profile = options.profile(arguments)
    workers = arguments.workers
    if workers is None:
        workers = default_workers(
            cores(), profile.global_batch, smallest_micro_batch=workload.smallest_micro_batch
        )
    check_workers(workers)
    options.check(profile, workers=workers)
    chosen = settings.load()
    result = run_job(
        Job(
            target=ModuleTarget(workload.module),
            arguments=options.words(arguments),
            workers=workers,
            # HORA_RUN_DIR as the user set it; inside a rank of another job it is that job's.
            run_dir=arguments.run_dir or (chosen.run_dir if chosen.job is None else None),
            name=workload.name,
            env=checkpoint_variables(arguments),
            restarts=restarts(arguments.restarts),
        )
    )
    if result.exit_code:
        # Why it failed is on the screen by now, and stays the last thing there. `hora report` writes the
        # report again where that cannot be done now: on a full disk, say.
        with contextlib.suppress(HoraError):
            write_report(result.run)
        return result.exit_code
    report = write_report(result.run)
    summary: dict[str, Any] = result.run.about().get("summary") or {}
    if not summary:
        print(f"report: {report}", file=sys.stderr)
        return 1
    print("", *table(summary, report=report), sep="\n")
    sentence = missed(summary)
    if sentence is not None:
        print(f"hora: {sentence}", file=sys.stderr)
        return 1
    return 0


def _check_extras(workload: Workload) -> None:
    for module, package in workload.extras:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"Training needs {package}.", fix="Run `pip install 'hora[workloads]'`.")

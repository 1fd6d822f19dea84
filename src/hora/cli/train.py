"""``hora train WORKLOAD``: train a workload to its target and report how it went."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hora.core.errors import MissingExtraError
from hora.workloads.registry import WORKLOADS, Workload, default_workers


def configure(parser: argparse.ArgumentParser) -> None:
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
        workload.options().add(sub)


def main(arguments: argparse.Namespace) -> int:
    """0 when the target was reached, 1 when not, the failing rank's code when the job failed."""
    from hora.core import settings
    from hora.launch import Job, ModuleTarget, run_job
    from hora.launch.job import check_workers, cores
    from hora.report import write_report

    workload = WORKLOADS[arguments.workload]
    _check_extras()
    options = workload.options()
    profile = options.profile(arguments)
    workers = arguments.workers
    if workers is None:
        workers = default_workers(cores(), profile.global_batch)
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
        )
    )
    report = write_report(result.run)
    summary: dict[str, Any] = result.run.about().get("summary") or {}
    if not summary:
        print(f"report: {report}", file=sys.stderr)
        return result.exit_code or 1
    print("\n".join(_table(workload, summary, report)))
    if result.exit_code:
        return result.exit_code
    if not summary["reached"]:
        print(
            f"hora: target not reached: accuracy {summary['accuracy']:.4f} is below {summary['target']} "
            f"after {summary['epochs']} epochs",
            file=sys.stderr,
        )
        return 1
    return 0


def _table(workload: Workload, summary: dict[str, Any], report: Path) -> list[str]:
    workers = summary["workers"]
    verdict = "reached" if summary["reached"] else "not reached"
    epochs = f"{summary['epochs']} epoch{'s' if summary['epochs'] != 1 else ''}"
    rate = summary["samples_per_second"]
    rows = [
        ("workload", f"{workload.name}, profile {summary['profile']}, {summary['data']}"),
        ("accuracy", f"{summary['accuracy']:.4f}, target {summary['target']} {verdict}"),
        ("time to train", f"{summary['time_to_train']:.1f} s, {epochs}, {summary['steps']:,} steps"),
        ("throughput", f"{rate:,.0f} samples/s, {rate / workers:,.0f} per worker"),
    ]
    if summary.get("scaling_factor"):
        rows.append(("scaling factor", f"{summary['scaling_factor']:.2f} ({workers} workers over one)"))
    rows.append(("report", str(_short(report))))
    width = max(len(name) for name, _ in rows)
    return ["", *(f"{name:<{width}}  {value}" for name, value in rows)]


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check_extras() -> None:
    for module, package in (("torch", "PyTorch"), ("mlperf_logging", "mlperf-logging"), ("PIL", "Pillow")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"Training needs {package}.", fix="Run `pip install 'hora[workloads]'`.")

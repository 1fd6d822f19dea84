"""``hora study batch-size resnet``: what a larger global batch costs, and what helps."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from hora.core.errors import UsageError

GRID = ("batches", "methods", "seeds")
FIXED = ("profile", "data", "epochs", "width", "warmup_epochs")


def configure(parser: argparse.ArgumentParser) -> None:
    """The studies, each with the workloads that it takes."""
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    text = "train with growing global batches, scaled naively, with warm-up and with LARS"
    study = studies.add_parser("batch-size", help=text, description=text[0].upper() + text[1:] + ".")
    study.add_argument("workload", choices=["resnet"], help="what is trained")
    study.add_argument("--quick", action="store_true", help="a small grid of short trainings, in a minute")
    study.add_argument("--profile", choices=["quick", "full"], help="data, model and rates (default: quick)")
    study.add_argument("--data", type=Path, metavar="PATH", help="directory of the images")
    study.add_argument("--epochs", type=int, metavar="N", help="of each training (default: 10)")
    study.add_argument("--batches", metavar="N,N", help="global batches (default: 128,512,1024,2048)")
    study.add_argument("--methods", metavar="M,M", help="of fixed, linear, warmup, lars (default: all)")
    study.add_argument("--seeds", metavar="N,N", help="a training of each cell from each (default: 1)")
    study.add_argument("--width", type=int, metavar="N", help="channels of the model's first stage")
    study.add_argument("--warmup-epochs", type=float, metavar="X", help="default: 2")
    study.add_argument("-n", "--workers", type=int, default=1, metavar="N", help="default: 1")
    study.add_argument("--run-dir", type=Path, metavar="D", help="default: runs/study-DATE-TIME")
    study.add_argument(
        "--resume",
        type=Path,
        metavar="D",
        help="go on with this study; --seeds, --batches, --methods may grow",
    )


def main(arguments: argparse.Namespace) -> int:
    """Train what is left of the grid, and print the table; 0 when all is done.

    Raises:
        HoraError: the grid, the data or the machine do not allow it.
    """
    from hora.core.rundir import default_path
    from hora.launch import Job, ModuleTarget, run_job
    from hora.launch.job import check_workers
    from hora.workloads.resnet import data
    from hora.workloads.resnet.config import PROFILES
    from hora.workloads.study.directory import StudyDirectory
    from hora.workloads.study.page import text_table, write_page

    if arguments.resume is not None and arguments.run_dir is not None:
        raise UsageError("--resume names the study's directory already.", fix="Leave out --run-dir.")
    directory = StudyDirectory(arguments.resume or arguments.run_dir or default_path("study"))
    plan = _plan(arguments, directory)
    check_workers(arguments.workers)
    chosen = dataclasses.replace(
        PROFILES[plan.profile].data, path=None if plan.data is None else Path(plan.data)
    )
    plan.check(len(data.load(chosen).train), workers=arguments.workers)
    directory.write_plan(plan)
    done = {result.cell for result in directory.results()}
    code = 0
    if any(cell not in done for cell in plan.cells()):
        result = run_job(
            Job(
                target=ModuleTarget("hora.workloads.study.train"),
                arguments=[str(directory.path)],
                workers=arguments.workers,
                run_dir=directory.next_run(),
                name="study",
                # A loss that is not finite is a result here.
                env={"HORA_GUARD": "off"},
            )
        )
        code = result.exit_code
    write_page(directory, plan)
    print(f"\n{text_table(plan, directory.results())}\n\nreport  {directory.page}")
    if code:
        print(f"go on   hora study batch-size resnet --resume {directory.path}")
    return code


def _plan(arguments: argparse.Namespace, directory: Any) -> Any:
    from hora.workloads.study.plan import QUICK, Plan

    given: dict[str, Any] = {name: value for name in FIXED if (value := getattr(arguments, name)) is not None}
    if "data" in given:
        given["data"] = str(given["data"].absolute())
    grid: dict[str, Any] = {}
    for name in GRID:
        text = getattr(arguments, name)
        if text is not None:
            grid[name] = tuple(text.split(",")) if name == "methods" else _numbers(name, text)
    if arguments.resume is None:
        return dataclasses.replace(QUICK if arguments.quick else Plan(), **given, **grid)
    if given or arguments.quick:
        name = next(iter(given), "quick").replace("_", "-")
        raise UsageError(
            f"--{name} does not go with --resume: the cells that are done were trained otherwise.",
            fix="Leave it out, or begin another study without --resume.",
        )
    return dataclasses.replace(directory.plan(), **grid)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--{name} {text} is no list of whole numbers.", fix=f"Write for example --{name} 1,2."
        ) from None

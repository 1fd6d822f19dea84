from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hora.cli import main
from hora.core.errors import DiskFullError
from hora.core.rundir import RunDirectory
from hora.launch import Job, JobResult
from hora.workloads.registry import WORKLOADS, default_workers
from hora.workloads.resnet import fashion_mnist, options

SHIPPED = str(fashion_mnist.SHIPPED)
SOURCE = Path(__file__).parents[2] / "src"
SMALL = ["--data", SHIPPED, "--width", "4", "--epochs", "1", "--global-batch", "1000"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("HORA_"):
            monkeypatch.delenv(name)
    return tmp_path


def damaged(place: Path) -> str:
    place.mkdir()
    for split in fashion_mnist.SPLITS:
        for name in (split.images, split.labels):
            (place / name).write_bytes((fashion_mnist.SHIPPED / name).read_bytes()[:-1])
    return str(place)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "/nowhere"], "The data directory /nowhere does not exist"),
        (["--data", "damaged"], "truncated or damaged"),
        (["--profile", "full", "--data", SHIPPED], "apt-get install dataset-fashion-mnist"),
        (["--profile", "reference"], "no images of its own"),
        (["--profile", "reference", "--data", "/nowhere"], "There is no folder /nowhere/train"),
        (
            ["-n", "3", "--data", SHIPPED],
            "--global-batch 128 does not divide among 3 workers. Use 126 or 129",
        ),
        (["-n", "2", "--global-batch", "20000", "--data", SHIPPED], "larger than the 10000 training images"),
        (["-n", "0"], "0 is not a number of workers"),
        (["--global-batch", "0"], "--global-batch 0 is out of range"),
        (["--epochs", "0"], "--epochs 0 is out of range"),
        (["--target", "87"], "--target 87.0 is out of range"),
        (["--calibration", "-1"], "--calibration -1.0 is out of range"),
        (["--seed", "-1"], "--seed -1 is out of range"),
        (["--lr", "nan"], "--lr nan is not a learning rate"),
        (["--data", SHIPPED, "--run-dir", "occupied"], "is occupied"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    empty: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    if "damaged" in words:
        words = [damaged(empty / "damaged") if word == "damaged" else word for word in words]
    if "occupied" in words:
        (empty / "occupied").mkdir()
        (empty / "occupied" / "file").write_text("mine")
    before = sorted(empty.rglob("*"))
    assert main(["train", "resnet", *words]) == 2
    output = capfd.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""
    assert sorted(empty.rglob("*")) == before


def test_a_workload_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "alexnet"])
    assert caught.value.code == 2
    assert "resnet" in capsys.readouterr().err


def hora(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-m", "hora.cli", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def train(*words: str) -> subprocess.CompletedProcess[str]:
    """A short training with a small model, into the run directory ``run``."""
    small = ["--run-dir", "run", *SMALL]
    return hora("train", "resnet", *small, *words)


def test_a_training_that_misses_its_target(empty: Path) -> None:
    """The whole way, with a run so short that it cannot get there: table, report, one line, exit code 1."""
    done = train("-n", "2", "--calibration", "0.01")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hora: target not reached: accuracy 0.")
    assert last.endswith("is below 0.87 after 1 epoch")
    table = dict(line.split("  ", 1) for line in done.stdout.splitlines() if line)
    names = ["workload", "accuracy", "time to train", "throughput", "scaling factor", "report"]
    assert list(table) == names
    assert table["report"].strip() == "run/report.html"
    assert "not reached" in table["accuracy"]
    assert (empty / "run" / "report.html").stat().st_size > 10_000
    summary = json.loads((empty / "run" / "run.json").read_text())["summary"]
    assert (summary["reached"], summary["workers"], summary["steps"]) == (False, 2, 10)
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr


def test_hora_run_says_the_same_of_a_missed_target(empty: Path) -> None:
    words = ["-m", "hora.workloads.resnet.train", *SMALL, "--calibration", "0"]
    done = hora("run", "-n", "1", "--run-dir", "run", *words)
    assert done.returncode == 1, done.stderr
    report, last = done.stderr.splitlines()[-2:]
    assert report == "hora: report run/report.html"
    assert (empty / "run" / "report.html").stat().st_size > 10_000
    assert last.startswith("hora: target not reached: accuracy 0.")
    assert last.endswith("is below 0.87 after 1 epoch")


def test_a_training_that_fails_ends_with_its_first_failure(empty: Path) -> None:
    done = train("-n", "1", "--calibration", "0", "--lr", "1e30")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "TrainingError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("  log: ")
    assert (empty / "run" / "report.html").stat().st_size > 10_000


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls the verb with a job that ends as told."""

    def call(exit_code: int, *, interrupted_by: int | None = None) -> int:
        def run_job(job: Job) -> JobResult:
            assert job.run_dir is not None
            run = RunDirectory.create(job.run_dir)
            return JobResult(
                exit_code=exit_code, failure=None, run=run, seconds=1.0, interrupted_by=interrupted_by
            )

        monkeypatch.setattr("hora.launch.run_job", run_job)
        return main(["train", "resnet", "-n", "1", "--data", SHIPPED, "--run-dir", "run"])

    return call


@pytest.mark.parametrize(("exit_code", "interrupted_by"), [(3, None), (130, signal.SIGINT), (124, None)])
def test_nothing_is_said_after_a_failure(
    ending: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    empty: Path,
    exit_code: int,
    interrupted_by: int | None,
) -> None:
    assert ending(exit_code, interrupted_by=interrupted_by) == exit_code
    assert capfd.readouterr() == ("", "")
    assert (empty / "run" / "report.html").exists()


def test_a_full_disk_does_not_hide_how_the_job_failed(
    ending: Callable[..., int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: RunDirectory) -> Path:
        raise DiskFullError(f"The disk is full: {run.path}.", fix="Free some space.")

    monkeypatch.setattr("hora.report.write_report", full)
    assert ending(3) == 3
    assert capfd.readouterr() == ("", "")


def test_a_run_without_a_summary_has_a_report(
    ending: Callable[..., int], capfd: pytest.CaptureFixture[str], empty: Path
) -> None:
    assert ending(0) == 1
    assert capfd.readouterr() == ("", f"report: {empty / 'run' / 'report.html'}\n")


def test_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    output = capsys.readouterr().out
    assert list(WORKLOADS) == ["resnet", "ssd", "maskrcnn"]
    assert "hora train resnet --profile quick: top-1 accuracy of at least 0.87\n" in output
    assert "hora train ssd --profile quick: box AP of at least 0.23\n" in output
    aims = "box AP of at least 0.377, mask AP of at least 0.339\n"
    assert f"hora train maskrcnn --profile reference: {aims}" in output


@pytest.mark.parametrize(
    ("cores", "global_batch", "workers"),
    [(1, 128, 1), (2, 128, 2), (64, 128, 2), (3, 256, 2), (64, 256, 4), (8, 33, 1), (6, 640, 5)],
)
def test_default_workers_divide_the_batch_and_keep_it_worth_while(
    cores: int, global_batch: int, workers: int
) -> None:
    assert default_workers(cores, global_batch, smallest_micro_batch=64) == workers


def test_options_survive_the_way_to_the_workers() -> None:
    parser = argparse.ArgumentParser()
    options.add(parser)
    words = ["--profile", "full", "--data", "here", "--seed", "7", "--epochs", "3", "--global-batch", "256"]
    words += [
        "--optimizer",
        "lars",
        "--target",
        "0.5",
        "--train-on",
        "--width",
        "8",
        "--precision",
        "float32",
    ]
    first = parser.parse_args(words)
    again = parser.parse_args(options.words(first))
    assert again.data == Path("here").absolute()
    again.data = first.data
    assert options.profile(again) == options.profile(first)


def test_the_learning_rate_grows_with_the_global_batch_in_steps_of_a_thousandth() -> None:
    parser = argparse.ArgumentParser()
    options.add(parser)
    rate = lambda *words: options.profile(parser.parse_args([*words])).optimizer.lr  # noqa: E731
    assert rate() == 0.1
    assert rate("--global-batch", "256") == 0.2
    assert rate("--global-batch", "96") == 0.075
    assert rate("--global-batch", "1") == 0.001
    assert rate("--global-batch", "256", "--lr", "0.3") == 0.3


def test_the_command_line_needs_no_framework() -> None:
    code = (
        "import sys, hora.cli.train, hora.cli.workloads, hora.workloads.resnet.options;"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])},
        check=False,
    )
    assert done.returncode == 0

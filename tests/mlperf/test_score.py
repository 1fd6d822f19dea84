"""Scores by hand, what a log has to hold, and the verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hora.cli import main
from hora.core.errors import DataError, RunDirectoryError, UsageError
from hora.mlperf import MLPerfLog, maskrcnn_hyperparameters, ssd_hyperparameters
from hora.mlperf.result import Result, read
from hora.mlperf.score import RUNS, score

SSD = ssd_hyperparameters(
    global_batch=32, lr=0.0025, weight_decay=5e-4, warmup_steps=300, decay_epochs=(44, 55), bn_span=16
)
MASKRCNN = maskrcnn_hyperparameters(
    global_batch=16,
    lr=0.02,
    warmup_steps=500,
    decay_factor=0.1,
    decay_steps=[60_000, 80_000],
    candidates=1000,
    image_sizes=(800, 1333),
)


def run(place: Path, benchmark: str, values: Any, accuracy: Any, *, status: str = "success") -> Path:
    """A run directory with the log of a training of one epoch."""
    place.mkdir()
    with MLPerfLog(place / "mlperf.log") as log:
        log.submission(benchmark, division="closed", platform="test")
        log.event("cache_clear", False)
        log.start("init_start")
        log.stop("init_stop")
        log.start("run_start")
        for key, value in values.items():
            log.event(key, value)
        log.event("train_samples", 100)
        log.event("eval_samples", 10)
        log.start("epoch_start", epoch_num=1)
        log.stop("epoch_stop", epoch_num=1)
        log.start("eval_start", epoch_num=1)
        log.event("eval_accuracy", accuracy, epoch_num=1)
        log.stop("eval_stop", epoch_num=1)
        log.stop("run_stop", status=status)
    return place


def result(seconds: float, *, reached: bool = True, benchmark: str = "ssd", run: str = "") -> Result:
    return Result(
        run=Path(run or f"run-{seconds}"),
        benchmark=benchmark,
        seconds=seconds,
        reached=reached,
        accuracy=0.23,
        epochs=4,
        global_batch=32,
    )


@pytest.mark.parametrize(
    ("benchmark", "values", "scores"),
    [
        ("ssd", SSD, (0.231, 0.229)),
        ("maskrcnn", MASKRCNN, ({"BBOX": 0.378, "SEGM": 0.34}, {"BBOX": 0.378, "SEGM": 0.338})),
    ],
)
def test_logs_of_detectors_pass_the_closed_rules_with_their_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], benchmark: str, values: Any, scores: tuple[Any, Any]
) -> None:
    good, bad = scores
    assert main(["mlperf", "check", str(run(tmp_path / "good", benchmark, values, good))]) == 0
    assert "passes the compliance checker of rule set 0.7.0" in capsys.readouterr().out
    assert main(["mlperf", "check", str(run(tmp_path / "bad", benchmark, values, bad))]) == 1
    assert capsys.readouterr().err.endswith("does not pass rule set 0.7.0\n")


def test_the_fastest_and_the_slowest_are_dropped() -> None:
    found = score([result(seconds) for seconds in (50, 10, 21, 20, 25)])
    assert (found.seconds, found.fastest.seconds, found.slowest.seconds) == (22.0, 10, 50)
    # A run that missed its target is the slowest, however early it gave up.
    found = score([result(1, reached=False), *(result(seconds) for seconds in (10, 21, 20, 25))])
    assert (found.seconds, found.slowest.seconds) == (22.0, 1)
    assert RUNS == {"resnet": 5, "ssd": 5, "maskrcnn": 5, "gnmt": 10, "transformer": 10, "minigo": 10}


def test_what_makes_no_score() -> None:
    with pytest.raises(UsageError, match=r"ssd takes 5 runs; 2 runs given. Train 3 more.*hora train ssd"):
        score([result(1), result(2)])
    with pytest.raises(UsageError, match="Leave out 1"):
        score([result(seconds) for seconds in range(6)])
    with pytest.raises(UsageError, match="2 benchmarks: resnet, ssd"):
        score([result(1), result(2, benchmark="resnet")])
    with pytest.raises(UsageError, match="is given twice"):
        score([result(1, run="a"), result(2, run="./a")])
    with pytest.raises(DataError, match="2 runs missed their target: run-1, run-2"):
        score([result(seconds, reached=seconds > 2) for seconds in range(1, 6)])


def test_a_log_tells_time_accuracy_and_status(tmp_path: Path) -> None:
    found = read(run(tmp_path / "run", "ssd", SSD, 0.1, status="aborted"))
    assert (found.benchmark, found.reached, found.accuracy, found.epochs) == ("ssd", False, 0.1, 1)
    assert found.global_batch == 32
    assert 0 <= found.seconds < 10


def test_logs_that_tell_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlperf", "check", str(tmp_path)]) == 2
    assert "holds no mlperf.log. Give the directory of a training" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match="holds no mlperf.log"):
        read(tmp_path)
    whole = run(tmp_path / "run", "ssd", SSD, 0.3)
    log = whole / "mlperf.log"
    text = log.read_text()
    for key, message in (("run_stop", "has no run_stop"), ("epoch_start", "another run's checkpoint")):
        log.write_text("".join(line for line in text.splitlines(keepends=True) if f'"{key}"' not in line))
        with pytest.raises(DataError, match=message):
            read(whole)
    log.write_text(text[:-20])
    with pytest.raises(DataError, match="holds a damaged line"):
        read(whole)


def test_a_score_and_a_comparison_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run(tmp_path / str(number), "maskrcnn", MASKRCNN, None)) for number in range(5)]
    assert main(["mlperf", "score", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in (lines[0], lines[4])] == ["dropped: fastest", "dropped: slowest"]
    assert lines[5].endswith("score of maskrcnn")
    assert "Not an MLPerf result" in lines[6]
    assert main(["mlperf", "compare", runs[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["minutes", "207.48", "101.00", "95.20"]
    assert lines[4].split()[-1] == runs[0]
    assert "Not an MLPerf result" in lines[-1]

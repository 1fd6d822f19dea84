"""``hora study``: from the words on the command line to the table, and on from where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hora.cli import main
from hora.workloads.resnet import fashion_mnist
from hora.workloads.study.directory import StudyDirectory

WORDS = ["study", "batch-size", "resnet", "--data", str(fashion_mnist.SHIPPED)]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("HORA_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "128,x"], "--batches 128,x is no list"),
        (["--methods", "adam"], "no method 'adam'"),
        (["--batches", "128,30000"], "30000 does not fit"),
        (["--resume", "nowhere"], "--data does not go with --resume"),
        (["--resume", "nowhere", "--run-dir", "there"], "Leave out --run-dir"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    empty: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*WORDS, *words]) == 2
    output = capfd.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert list(empty.iterdir()) == []


def test_a_study_goes_on_with_the_cells_that_are_left(empty: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "2", "--epochs", "1", "--warmup-epochs", "0.5", "--run-dir", "mine"]
    assert main([*WORDS, *small, "--batches", "2500", "--methods", "linear"]) == 0
    directory = StudyDirectory(empty / "mine")
    (first,) = directory.results()
    assert (first.cell.batch, first.steps, first.lr) == (2500, 4, pytest.approx(0.1 * 2500 / 128))
    assert first.noise_scale is not None  # 20 micro-batches per step are two batch sizes
    capfd.readouterr()
    more = ["study", "batch-size", "resnet", "--resume", "mine"]
    assert main([*more, "--batches", "2500,5000", "-n", "2"]) == 0
    output = capfd.readouterr()
    assert directory.results()[0] == first
    assert [result.cell.batch for result in directory.results()] == [2500, 5000]
    assert "cell 2 of 2: SGD, linear rule, 5000 samples per step, seed 1: accuracy 0." in output.err
    assert output.out.split()[:2] == ["global", "batch"]
    assert json.loads((directory.path / "study.json").read_text())["batches"] == [2500, 5000]
    assert (directory.path / "runs" / "2" / "run.json").is_file()
    assert directory.page.stat().st_size > 5_000

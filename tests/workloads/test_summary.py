from __future__ import annotations

from pathlib import Path

import pytest

from hora.workloads.summary import missed, table

SUMMARY = {
    "workload": "resnet",
    "profile": "quick",
    "data": "photographs",
    "target": 0.87,
    "reached": True,
    "accuracy": 0.8756,
    "epochs": 8,
    "steps": 1250,
    "time_to_train": 61.04,
    "samples_per_second": 2468.0,
    "scaling_factor": 1.876,
    "scaling": {"factor": 1.876, "low": 1.79, "high": 1.913},
    "workers": 2,
}


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert table(SUMMARY, report=tmp_path / "run" / "report.html") == [
        "workload        resnet, profile quick, photographs",
        "accuracy        0.8756, target 0.87 reached",
        "time to train   61.0 s, 8 epochs, 1,250 steps",
        "throughput      2,468 samples/s, 1,234 per worker",
        "scaling factor  1.88 (2 workers over one, 95 % between 1.79 and 1.91)",
        "report          run/report.html",
    ]


def test_the_table_of_one_worker_and_one_step() -> None:
    summary = SUMMARY | {"reached": False, "epochs": 1, "steps": 1, "workers": 1, "scaling_factor": None}
    assert table(summary, report=Path("/elsewhere/report.html"))[1:] == [
        "accuracy       0.8756, target 0.87 not reached",
        "time to train  61.0 s, 1 epoch, 1 step",
        "throughput     2,468 samples/s, 2,468 per worker",
        "report         /elsewhere/report.html",
    ]


def test_a_target_that_was_missed() -> None:
    assert missed(SUMMARY) is None
    assert missed({}) is None
    sentence = "target not reached: accuracy 0.1250 is below 0.87 after"
    assert missed(SUMMARY | {"reached": False, "accuracy": 0.125}) == f"{sentence} 8 epochs"
    assert missed(SUMMARY | {"reached": False, "accuracy": 0.125, "epochs": 1}) == f"{sentence} 1 epoch"

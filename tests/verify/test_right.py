"""Scripts for which N workers are one worker."""

from __future__ import annotations

import json

import pytest
from tests.verify.conftest import Ask


@pytest.mark.parametrize(
    ("script", "workers"),
    [
        ("hora_loader", 2),
        ("hora_loader", 3),
        ("horovod_form", 3),
        ("indexing", 3),
        ("accumulation", 2),
        ("sync_batch_norm", 3),
        ("lbfgs", 2),
        ("transformer", 2),
        ("gan", 3),
        ("uneven", 2),
        ("uneven", 3),
    ],
)
def test_it_is_verified(ask: Ask, script: str, workers: int) -> None:
    report = ask(script, workers=workers)
    assert report.lines()[0].startswith(f"{workers} workers = 1 worker: ")
    assert report.equal
    assert report.causes == []
    assert report.compared.largest < report.compared.tolerance.at(8)


def test_in_float64_the_bound_is_tight(ask: Ask) -> None:
    report = ask("hora_loader", float64=True)
    assert report.equal
    assert report.compared.tolerance.dtype == "float64"
    # 4096 epsilons per step, and what is left of float32's rounding would be nine digits larger.
    assert report.compared.tolerance.at(8) == 8 * 4096 * 2.0**-52
    assert 0 < report.compared.largest < 1e-13


def test_the_answer_says_how_far_it_reaches(ask: Ask) -> None:
    report = ask("hora_loader", steps=3)
    assert report.compared.steps == 3
    assert any("stopped after 3 steps" in line for line in report.lines())
    kept = json.loads(report.write().read_text())
    assert (kept["equal"], kept["steps"], kept["workers"], kept["causes"]) == (True, 3, 2, [])
    assert [run["workers"] for run in kept["runs"]] == [1, 2]

"""Scripts for which N workers are one worker."""

from __future__ import annotations

import json
from pathlib import Path

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
        ("sharded", 3),
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


UNSEEDED = """
import time
import torch
import hora.torch as hora

hora.init()
SEED
model = torch.nn.Linear(2, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for (x,) in hora.data_loader((torch.arange(24.0).reshape(12, 2),), global_batch=4, seed=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_a_script_that_seeds_nothing_starts_alike_in_both_runs(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED.replace("SEED", ""))
    assert ask(script).equal


def test_one_that_seeds_nothing_and_does_not_broadcast_is_found(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED.replace("SEED", "").replace("hora.broadcast_parameters(model)", ""))
    [found] = ask(script).causes
    assert (found.name, "rank 1 starts with another weight" in found.why) == ("initial-parameters", True)


def test_one_that_seeds_by_the_time_is_told_so(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED.replace("SEED", "torch.manual_seed(time.time_ns() % 2**60)"))
    [found] = ask(script).causes
    assert found.name == "initial-parameters"
    assert "Every run starts from parameters of its own: 2 workers start with another weight" in found.why
    assert "by a fixed number" in found.fix

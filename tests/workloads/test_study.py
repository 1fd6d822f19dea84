"""Studies of the global batch: the grid, what is kept of it, and the table that comes out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hora.core.errors import GlobalBatchError, RunDirectoryError, UsageError
from hora.workloads.study.directory import Result, StudyDirectory
from hora.workloads.study.page import rows, text_table, write_page
from hora.workloads.study.plan import QUICK, Cell, Plan

PLAN = Plan(batches=(128, 512), methods=("fixed", "linear", "warmup", "lars"), seeds=(1, 2))


def result(cell: Cell, accuracy: float, *, finite: bool = True) -> Result:
    losses = (2.0, 1.0 if finite else math.nan)
    return Result(
        cell=cell,
        accuracy=accuracy,
        losses=losses,
        steps=10,
        lr=0.1,
        noise_scale=300.0,
        finite=finite,
        seconds=1.0,
    )


def test_the_grid_is_all_of_a_seed_before_the_next() -> None:
    cells = PLAN.cells()
    assert len(cells) == len(set(cells)) == 2 * 4 * 2
    assert [cell.seed for cell in cells] == [1] * 8 + [2] * 8
    assert cells[0] == Cell(method="fixed", batch=128, seed=1)
    assert Plan.from_json(PLAN.as_json()) == PLAN
    assert Plan.from_json(QUICK.as_json()) == QUICK


def test_what_trains_the_same_is_trained_once() -> None:
    fixed, linear, warm = (Cell(method=method, batch=128, seed=1) for method in ("fixed", "linear", "warmup"))
    assert PLAN.equal(linear, [fixed]) == fixed
    assert PLAN.equal(warm, [fixed]) is None
    assert PLAN.equal(linear, [Cell(method="fixed", batch=128, seed=2)]) is None
    larger = Cell(method="linear", batch=512, seed=1)
    assert PLAN.equal(larger, [Cell(method="fixed", batch=512, seed=1)]) is None


def test_rates_by_hand() -> None:
    """The quick profile has 0.1 for SGD and 5.0 for LARS at 128 samples; 512 are four times as many."""
    numbers = {
        method: (config.name, config.lr, config.warmup_epochs)
        for method in PLAN.methods
        for config in [PLAN.optimizer(Cell(method=method, batch=512, seed=1))]
    }
    assert numbers == {
        "fixed": ("sgd", 0.1, 0.0),
        "linear": ("sgd", 0.4, 0.0),
        "warmup": ("sgd", 0.4, 2.0),
        "lars": ("lars", 10.0, 2.0),
    }


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"methods": ("linear", "adam")}, UsageError, "no method 'adam'"),
        ({"seeds": ()}, UsageError, "--seeds  is empty"),
        ({"batches": (128, 128)}, UsageError, "128,128"),
        ({"epochs": 2}, UsageError, "warm-up of 2 epochs does not fit 2"),
        ({"batches": (129,)}, GlobalBatchError, "129 does not fit"),
        ({"batches": (20_000,)}, GlobalBatchError, "20000 does not fit 10000"),
    ],
)
def test_plans_that_cannot_be(changed: dict[str, object], error: type[Exception], message: str) -> None:
    values = PLAN.as_json() | changed
    with pytest.raises(error, match=message):
        Plan.from_json(values).check(10_000, workers=2)


def test_results_are_kept_and_a_line_that_was_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path / "study")
    with pytest.raises(RunDirectoryError, match="holds no study"):
        directory.plan()
    directory.write_plan(PLAN)
    first, second, third = PLAN.cells()[:3]
    directory.add(result(first, 0.5))
    with (directory.path / "cells.jsonl").open("a") as file:
        file.write('{"cell": {"method": "li')
    assert [each.cell for each in directory.results()] == [first]
    directory.add(result(second, 0.25))
    assert [each.cell for each in directory.results()] == [first, second]
    directory.add(result(third, 0.125, finite=False))
    assert directory.results()[-1].accuracy == 0.125
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(RunDirectoryError, match="not by a study"):
        StudyDirectory(other).write_plan(PLAN)


def test_the_table_has_the_mean_and_the_range_over_seeds(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    directory.write_plan(PLAN)
    cells = [Cell(method="lars", batch=128, seed=seed) for seed in (1, 2)]
    for cell, accuracy in zip(cells, (0.5, 0.75), strict=True):
        directory.add(result(cell, accuracy))
    directory.add(result(Cell(method="linear", batch=512, seed=1), 0.1, finite=False))
    table = rows(PLAN, directory.results())
    assert table[1] == ["128", "10", "-", "-", "-", "0.625 (0.500 to 0.750)"]
    assert table[2] == ["512", "10", "-", "0.100", "-", "-"]
    assert len({len(line) for line in text_table(PLAN, directory.results()).splitlines()}) == 1
    write_page(directory, PLAN)
    page = directory.page.read_text()
    assert "3 of 16 trainings are done" in page
    assert "not finite" in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert directory.plot.read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "| 128 | 10 | - | - | - | 0.625 (0.500 to 0.750) |" in directory.table.read_text()

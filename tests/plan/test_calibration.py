"""The fit: constants are found again from a made-up table, and the frozen ones are those of the tables."""

from dataclasses import asdict, replace

import pytest

from hora.plan import calibration
from hora.plan.calibration import calibrated, fit, fit_all, frozen
from hora.plan.hardware import MACHINES
from hora.plan.megatron import fit_kernels
from hora.plan.published import Measured
from hora.plan.step import Constants, Work, step

TRUE = Constants(tensor=2e9, plain=1.5e9, traffic=3e7, launch=0.01, sigma=0.03, exposed=0.5)


def made_up(machine: str, gpus: int, batch: float, precision: str) -> Measured:
    work = Work(
        gpus=gpus,
        batch=batch,
        micro_batches=2,
        precision=precision,  # type: ignore[arg-type]
        gradients=4e8,
    )
    seconds = step(TRUE, work, MACHINES[machine]).total
    rate = batch * 2 * gpus / seconds
    name = f"{machine} {gpus} {batch} {precision}"
    group = ("made up", "no preset", "", "")
    return Measured(source=name, group=group, software="1", machine=MACHINES[machine], work=work, rate=rate)


ROWS = [
    made_up(machine, gpus, batch, precision)
    for machine in ("dgx-1", "dgx-a100")
    for gpus in (1, 4, 8)
    for batch in (64.0, 256.0)
    for precision in ("mixed", "fp32")
]


def test_the_constants_behind_a_table_are_found_again():
    found = fit(ROWS)
    assert (found.sigma, found.exposed) == (TRUE.sigma, TRUE.exposed)
    for name in ("tensor", "plain", "traffic", "launch"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)


def test_a_question_beyond_the_table_is_answered_by_the_same_constants():
    asked = made_up("dgx-a100", 128, 128.0, "mixed")
    parts, nearness = calibration.Calibrated(fit(ROWS), tuple(ROWS)).parts(asked.work, asked.machine)
    assert parts.total / 2 == pytest.approx(asked.seconds, rel=1e-6)
    assert 0 < nearness < 0.5


def test_a_neighbours_error_moves_a_prediction_only_nearby():
    slow = [replace(row, rate=row.rate / 1.3) if row.machine.name == "dgx-1" else row for row in ROWS]
    found = calibration.Calibrated(TRUE, tuple(slow))
    near, far = made_up("dgx-1", 8, 256.0, "mixed"), made_up("dgx-a100", 8, 256.0, "mixed")
    assert found.parts(near.work, near.machine)[0].total / 2 > 1.15 * near.seconds
    assert found.parts(far.work, far.machine)[0].total / 2 < 1.08 * far.seconds


def test_a_row_that_is_left_out_has_no_say():
    row = ROWS[0]
    found = calibration.Calibrated(TRUE, (replace(row, rate=row.rate / 2),))
    assert found.parts(row.work, row.machine, without=row.source)[0].total / 2 == pytest.approx(row.seconds)
    assert found.parts(row.work, row.machine)[0].total / 2 > 1.5 * row.seconds


def test_the_frozen_constants_are_those_that_the_single_node_rows_give():
    again = fit_all()
    assert again.keys() == frozen().keys()
    for group, constants in frozen().items():
        for name, value in asdict(constants).items():
            assert getattr(again[group], name) == pytest.approx(value, rel=2e-3, abs=1e-9), (group, name)
    for name, value in asdict(fit_kernels()).items():
        assert getattr(calibration.kernels(), name) == pytest.approx(value, rel=2e-3), name


def test_no_row_of_several_servers_takes_part():
    assert all(row.nodes == 1 for found in calibrated().values() for row in found.rows)

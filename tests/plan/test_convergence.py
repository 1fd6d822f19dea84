"""Epochs by batch: an exact curve is found again, published points are near, bounds hold."""

import pytest

from hora.plan import convergence
from hora.plan.collectives import DATA
from hora.plan.convergence import Point, curve, fit
from hora.plan.published import rows_of


def test_an_exact_curve_is_found_again():
    points = [Point(batch=b, epochs=40 * (1 + b / 20_000), spread=0.0) for b in (1000, 4000, 16_000, 64_000)]
    found = fit(points)
    assert found.least == pytest.approx(40, rel=0.01)
    assert found.critical == pytest.approx(20_000, rel=0.03)
    assert found.epochs(32_000) == pytest.approx(104, rel=0.01)


def test_one_batch_gives_a_flat_curve():
    found = fit([Point(batch=512, epochs=10, spread=0.1), Point(batch=512, epochs=12, spread=0.1)])
    assert found.epochs(64) == found.epochs(10_000) == 11


def test_reference_points_are_met_without_having_been_seen():
    groups = convergence.points(rows_of(DATA / "mlperf_rcps.csv"))
    errors = [abs(error) for error in convergence.leave_one_out(groups["resnet"])]
    assert len(errors) == 6
    assert sum(errors) / 6 < 0.06


def test_a_diverged_point_and_another_models_points_stay_out():
    groups = convergence.points(rows_of(DATA / "mlperf_rcps.csv"))
    assert all(point.spread < 1 for group in groups.values() for point in group)
    assert len(groups["gpt3"]) == 3  # one of the four reference points holds a run that diverged
    assert max(point.epochs for point in groups["retinanet"]) < 20 < min(p.epochs for p in groups["ssd"])


def test_the_first_round_needs_its_own_epochs_on_one_server_and_more_than_today_beyond():
    first, today = curve("resnet", first_round=True), curve("resnet")
    assert first is not None
    assert today is not None
    assert first.epochs(3328) == pytest.approx(60)
    for batch in (8192, 33_280, 59_904):
        assert first.epochs(batch) > today.epochs(batch)
        assert first.half_width(batch) > today.half_width(batch)


def test_the_interval_grows_beyond_the_batches_that_were_seen():
    found = curve("resnet")
    assert found is not None
    assert found.half_width(10 * found.high) > found.half_width(found.high)
    assert curve("nothing") is None

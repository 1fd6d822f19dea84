"""Checkpoint intervals and goodput against Daly's abstract and equations worked out by hand."""

import math

import pytest

from hora.core.errors import UsageError
from hora.plan import failures


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_abstract(hours, minutes):
    assert failures.daly(300, hours * 3600) / 60 == pytest.approx(minutes, rel=0.006)


def test_young_by_hand_and_daly_beyond_its_range():
    assert failures.young(300, 86_400) == pytest.approx(7200 - 300)
    assert failures.daly(300, 150) == 150


def test_llama_3_is_interrupted_every_three_hours():
    assert failures.job_mtbf(16_384) / 3600 == pytest.approx(54 * 24 / 419, rel=0.01)


def test_goodput_is_the_first_order_formula_where_failures_are_rare():
    d, tau, restart, mtbf = 10.0, 1000.0, 100.0, 1e6
    first_order = 1 - d / tau - (tau / 2 + restart) / mtbf
    assert failures.goodput(d, mtbf, restart=restart, interval=tau) == pytest.approx(first_order, abs=2e-4)


@pytest.mark.parametrize("mtbf", [3e3, 1e4, 1e6])
def test_dalys_interval_is_the_best_one(mtbf):
    best = failures.daly(60, mtbf)
    at_best = failures.goodput(60, mtbf, restart=300, interval=best)
    others = [failures.goodput(60, mtbf, restart=300, interval=best * f) for f in (0.5, 0.8, 1.25, 2)]
    assert max(others) < at_best


def test_a_plan_for_llama_3_trains_most_of_the_time():
    plan = failures.plan_checkpoints(16_384, checkpoint=10, restart=600)
    assert plan.low < plan.fraction < plan.high < 1
    assert plan.fraction > 0.9  # "over 90 % effective training time" in the report on Llama 3


def test_a_plan_for_one_host_by_hand():
    plan = failures.plan_checkpoints(8, checkpoint=60, restart=600)
    mtbf = 50_700 * 3600 / 8
    assert plan.mtbf == pytest.approx(mtbf)
    # At the best interval, sqrt(2dM) in first order, checkpoints and lost work cost sqrt(2d/M) together.
    assert 1 - plan.fraction == pytest.approx(math.sqrt(2 * 60 / mtbf) + 600 / mtbf, rel=0.01)


def test_a_job_that_never_gets_anywhere_has_no_goodput():
    assert failures.goodput(60, 1, restart=600, interval=3600) == 0
    assert not math.isnan(failures.goodput(60, 10, restart=0, interval=600))


def test_wrong_values_are_named():
    with pytest.raises(UsageError, match="gpus=0"):
        failures.job_mtbf(0)
    with pytest.raises(UsageError, match="checkpoint=-1"):
        failures.daly(-1, 10)
    with pytest.raises(UsageError, match=r"restart=-2"):
        failures.goodput(1, 10, restart=-2, interval=5)
    with pytest.raises(UsageError, match=r"spread=0\.5"):
        failures.plan_checkpoints(8, spread=0.5)

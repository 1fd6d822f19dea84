"""The event schedules against closed forms and against a schedule worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.core.errors import UsageError
from hora.plan.schedule import exposed, one_forward_one_backward


@given(p=st.integers(1, 6), m=st.integers(1, 12), f=st.floats(0.1, 3.0), b=st.floats(0.1, 6.0))
@settings(max_examples=60, deadline=None)
def test_equal_stages_take_the_closed_form(p, m, f, b):
    # (m + p - 1)(f + b): every micro-batch passes, and the first and the last fill and drain the pipeline
    found = one_forward_one_backward([f] * p, [b] * p, m)
    assert found == pytest.approx((m + p - 1) * (f + b), rel=1e-9)


@given(st.lists(st.floats(0.1, 2.0), min_size=1, max_size=5), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_unequal_stages_lie_between_the_fullest_stage_and_one_after_another(stages, m):
    doubled = [2 * stage for stage in stages]
    found = one_forward_one_backward(stages, doubled, m)
    assert found >= m * 3 * max(stages) - 1e-9
    assert found <= m * 3 * sum(stages) + 1e-9


def test_two_stages_and_two_micro_batches_by_hand():
    # stage 0: f0 0-1, f1 1-2, b0 4-6, b1 7-9 ; stage 1: f0 1-2, b0 2-4, f1 4-5, b1 5-7
    assert one_forward_one_backward([1, 1], [2, 2], 2) == 9
    assert one_forward_one_backward([1, 1], [2, 2], 2, send=1) > 9


def test_a_pipeline_without_micro_batches_is_refused():
    with pytest.raises(UsageError, match="no pipeline"):
        one_forward_one_backward([1], [1], 0)


def test_buckets_hide_behind_backward_until_the_network_is_slower():
    slow = exposed(1e9, 1.0, lambda size: size / 0.5e9)
    assert slow == pytest.approx(2.0 + 1 / 40 - 1.0)  # 40 buckets; the first is ready after a fortieth
    fast = exposed(1e9, 1.0, lambda size: size / 10e9)
    assert fast == pytest.approx(0.1 / 40)  # only the last bucket
    assert exposed(1e9, 0.0, lambda size: size / 1e9) == pytest.approx(1.0)
    assert exposed(0.0, 1.0, lambda size: 1.0) == 0.0

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hora.core.errors import UsageError
from hora.torch.optim import cosine, linear_rule, polynomial, set_lr, sqrt_rule, step_decay


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),  # 1 * 1/4
        (1, 0.5),
        (3, 1.0),  # the last step of the warm-up has the peak
        (4, 1.0),  # and so has the first of the decay: 1 - 0/10
        (9, 0.1 + 0.9 * 0.25),  # half of the decay: (1/2)^2
        (13, 0.1 + 0.9 * 0.01),  # the last step: (1/10)^2
        (14, 0.1),
        (1000, 0.1),
    ],
)
def test_values_by_hand(step: int, expected: float) -> None:
    assert polynomial(step, base=1.0, end=0.1, warmup=4, total=14) == pytest.approx(expected, rel=1e-15)


def test_power_one_is_a_straight_line() -> None:
    rates = [polynomial(t, base=8.0, end=0.0, warmup=0, total=4, power=1.0) for t in range(5)]
    assert rates == [8.0, 6.0, 4.0, 2.0, 0.0]


def test_a_warm_up_longer_than_the_training() -> None:
    assert [polynomial(t, base=1.0, end=0.0, warmup=4, total=2) for t in range(3)] == [0.25, 0.5, 0.75]


def test_set_lr_reaches_all_groups() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_cosine_by_hand() -> None:
    rates = [cosine(t, base=2.0, end=1.0, warmup=2, total=8, start=1.0) for t in range(10)]
    falling = [1.5 + math.sqrt(3) / 4, 1.75, 1.5, 1.25, 1.5 - math.sqrt(3) / 4]  # cos of 30, 60, ... degrees
    assert rates == pytest.approx([1.5, 2.0, 2.0, *falling, 1.0, 1.0], rel=1e-14)


def test_steps_down_by_hand() -> None:
    rates = [step_decay(t, base=8.0, milestones=[4, 6], factor=0.5, warmup=2, start=4.0) for t in range(8)]
    assert rates == [6.0, 8.0, 8.0, 8.0, 4.0, 4.0, 2.0, 2.0]
    with pytest.raises(UsageError, match=r"milestones=\[4, 6\]"):
        step_decay(0, base=1.0, milestones=[6, 4])


@given(st.integers(1, 64), st.integers(0, 20), st.integers(1, 30), st.integers(0, 60), st.sampled_from("pcs"))
def test_samples_are_steps_of_a_global_batch(
    batch: int, warmup: int, rest: int, step: int, kind: str
) -> None:
    def rate(unit: int) -> float:
        at = step * unit
        options: Any = {"base": 3.0, "warmup": warmup * unit, "start": 0.5, "per_step": unit}
        if kind == "s":
            return step_decay(at, milestones=[(warmup + rest) * unit], **options)
        if kind == "c":
            return cosine(at, end=0.25, total=(warmup + rest) * unit, **options)
        return polynomial(at, end=0.25, total=(warmup + rest) * unit, **options)

    assert rate(batch) == pytest.approx(rate(1), rel=1e-12)


@given(st.integers(0, 20), st.integers(1, 30), st.floats(0.5, 3.0))
def test_a_rate_rises_to_its_peak_and_falls_to_its_end(warmup: int, rest: int, power: float) -> None:
    total = warmup + rest
    for rate in (
        lambda t: polynomial(t, base=3.0, end=0.25, warmup=warmup, total=total, start=0.5, power=power),
        lambda t: cosine(t, base=3.0, end=0.25, warmup=warmup, total=total, start=0.5),
    ):
        rates = [rate(t) for t in range(total + 2)]
        assert rates[:warmup] == sorted(rates[:warmup])
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
        assert (max(rates), rates[total], rates[-1]) == (3.0, 0.25, 0.25)
        assert min(rates) >= 0.25


def test_a_global_batch_that_does_not_divide_the_warm_up_stays_below_the_peak() -> None:
    assert [polynomial(t, base=1.0, end=0.0, warmup=10, total=40, per_step=8) for t in (0, 8)] == [0.8, 1.0]


def test_a_scheduler_of_torch_takes_a_schedule_for_each_group() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(1))], "lr": 2.0},
        {"params": [nn.Parameter(torch.ones(1))], "lr": 4.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: polynomial(t, base=1.0, end=0.0, warmup=2, total=4, power=1.0)
    )
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [[1.0, 2.0], [2.0, 4.0], [2.0, 4.0], [1.0, 2.0]]


def test_rules_for_another_batch() -> None:
    assert linear_rule(0.1, batch=8192, base_batch=256) == pytest.approx(3.2)
    assert sqrt_rule(0.1, batch=1024, base_batch=256) == pytest.approx(0.2)
    with pytest.raises(UsageError, match="batch=0"):
        linear_rule(0.1, batch=0, base_batch=256)
    with pytest.raises(UsageError, match="per_step=0"):
        cosine(0, base=1.0, warmup=0, total=4, per_step=0)


def test_label_smoothing_of_torch_is_that_of_the_paper() -> None:
    """C. Szegedy et al., arXiv:1512.00567, section 7: the label's distribution is (1 - s) onehot + s / K."""
    logits = torch.tensor([[1.0, 3.0, -2.0], [0.5, 0.0, 2.0]], dtype=torch.float64)
    loss = nn.functional.cross_entropy(logits, torch.tensor([1, 0]), label_smoothing=0.3)
    expected = 0.0
    for row, label in zip(logits.tolist(), (1, 0), strict=True):
        whole = math.log(sum(math.exp(z) for z in row))
        wanted = [0.1 + 0.7 * (k == label) for k in range(3)]
        expected -= sum(q * (z - whole) for q, z in zip(wanted, row, strict=True)) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-14)

from __future__ import annotations

import pytest
import torch
from torch import nn

from hora.torch.optim import polynomial, set_lr


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

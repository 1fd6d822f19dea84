from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hora.core.errors import UsageError
from hora.torch.optim import LARS, decay_groups


def reference(
    weights: list[list[float]], gradients: list[list[list[float]]], rates: list[float], *, trusted: list[bool]
) -> list[list[float]]:
    """The paper's equations for each number by itself, in plain Python floats."""
    momentum, decay, eta = 0.9, 2e-4, 0.001
    weights = [list(weight) for weight in weights]
    buffers = [[0.0] * len(weight) for weight in weights]
    for step, rate in enumerate(rates):
        for index, weight in enumerate(weights):
            gradient = gradients[step][index]
            trust, own_decay = 1.0, 0.0
            if trusted[index]:
                own_decay = decay
                size = math.sqrt(math.fsum(w * w for w in weight))
                slope = math.sqrt(math.fsum(g * g for g in gradient))
                trust = eta * size / (slope + decay * size) if size > 0 and slope > 0 else 1.0
            for i in range(len(weight)):
                buffers[index][i] = momentum * buffers[index][i] + rate * trust * (
                    gradient[i] + own_decay * weight[i]
                )
                weight[i] -= buffers[index][i]
    return weights


def test_follows_the_equations_of_the_paper_in_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 7, 4)]
    weights.append(torch.zeros(3, dtype=torch.float64))  # a trust ratio of 1 by definition
    gradients = [
        [torch.randn(len(w), generator=generator, dtype=torch.float64) for w in weights] for _ in range(4)
    ]
    trusted = [True, True, False, True]
    rates = [0.5, 1.0, 2.0, 0.1]

    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = LARS(
        [
            {"params": [p for p, t in zip(parameters, trusted, strict=True) if t], "weight_decay": 2e-4},
            {"params": [p for p, t in zip(parameters, trusted, strict=True) if not t], "trust": False},
        ],
        lr=1.0,
    )
    for rate, step in zip(rates, gradients, strict=True):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    expected = reference(
        [w.tolist() for w in weights],
        [[g.tolist() for g in step] for step in gradients],
        rates,
        trusted=trusted,
    )
    for parameter, values in zip(parameters, expected, strict=True):
        torch.testing.assert_close(
            parameter.data, torch.tensor(values, dtype=torch.float64), rtol=1e-13, atol=0
        )


def test_the_step_does_not_depend_on_the_size_of_the_gradient() -> None:
    moved = []
    for scale in (1.0, 1e6):
        weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        weight.grad = scale * torch.tensor([0.0, 1.0], dtype=torch.float64)
        LARS([weight], lr=2.0).step()
        moved.append(weight.detach()[1].item())
    # lr * eta * |w| = 2 * 0.001 * 5, along the gradient
    assert moved == pytest.approx([4.0 - 0.01, 4.0 - 0.01], rel=1e-12)


def test_a_parameter_without_gradient_stays() -> None:
    still, moving = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    moving.grad = torch.ones(2)
    LARS([still, moving], lr=1.0, weight_decay=1.0).step()
    assert still.tolist() == [1.0, 1.0]
    assert moving.tolist() != [1.0, 1.0]


def test_state_survives_a_round_trip() -> None:
    def take(parameter: nn.Parameter, optimizer: LARS) -> None:
        parameter.grad = torch.tensor([1.0, 2.0])
        optimizer.step()

    first = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = LARS([first], lr=1.0)
    take(first, optimizer)
    second = nn.Parameter(first.detach().clone())
    other = LARS([second], lr=7.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(first, optimizer)
    take(second, other)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("momentum", 1.0), ("eta", float("nan")), ("epsilon", -1e-9)]
)
def test_values_out_of_range(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        LARS([nn.Parameter(torch.ones(1))], **{"lr": 1.0, name: value})


def test_groups_leave_normalizations_and_biases_out() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    model[0].bias.requires_grad_(False)
    weights, others = decay_groups(model, weight_decay=0.5)
    assert [tuple(p.shape) for p in weights["params"]] == [(2, 1, 3, 3), (3, 2)]
    assert [tuple(p.shape) for p in others["params"]] == [(2,), (2,), (3,)]
    assert (weights["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert (weights["trust"], others["trust"]) == (True, False)

"""LARS, LAMB and NovoGrad: against their papers' equations, by hand, and by what has to hold of any step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.optim import equations
from torch import nn

from hora.core.errors import UsageError
from hora.torch.optim import LAMB, LARS, NovoGrad

Make = Callable[[Any], torch.optim.Optimizer]

LARS_NUMBERS = {"lr": 0.7, "momentum": 0.9, "eta": 0.01}
LAMB_NUMBERS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "epsilon": 1e-6}
NOVO_NUMBERS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.7), "epsilon": 1e-8}

CASES: dict[str, tuple[Make, equations.Step]] = {
    "LARS": (
        lambda p: LARS(p, **LARS_NUMBERS, weight_decay=0.05),
        equations.lars(**LARS_NUMBERS, decay=0.05, inside=True),
    ),
    "LARS, lr outside": (
        lambda p: LARS(p, **LARS_NUMBERS, weight_decay=0.05, lr_in_momentum=False),
        equations.lars(**LARS_NUMBERS, decay=0.05, inside=False),
    ),
    "LARS without trust": (
        lambda p: LARS(p, **LARS_NUMBERS, trust=False),
        equations.lars(**LARS_NUMBERS, decay=0.0, inside=True, trust=False),
    ),
    "LAMB": (
        lambda p: LAMB(p, **LAMB_NUMBERS, weight_decay=0.1),
        equations.lamb(**LAMB_NUMBERS, decay=0.1),
    ),
    "LAMB, bounded, no correction": (
        lambda p: LAMB(p, **LAMB_NUMBERS, bias_correction=False, bounds=(0.5, 1.5)),
        equations.lamb(**LAMB_NUMBERS, decay=0.0, correct=False, bounds=(0.5, 1.5)),
    ),
    "NovoGrad": (
        lambda p: NovoGrad(p, **NOVO_NUMBERS, weight_decay=0.1),
        equations.novograd(**NOVO_NUMBERS, decay=0.1),
    ),
    "NovoGrad, averaging": (
        lambda p: NovoGrad(p, **NOVO_NUMBERS, averaging=True),
        equations.novograd(**NOVO_NUMBERS, decay=0.0, averaging=True),
    ),
}


def arrays(seed: int, steps: int = 4) -> tuple[list[Any], list[list[Any]]]:
    """Tensors of several shapes and sizes, one of zeros, and their gradients, one of them zero."""
    random = np.random.default_rng(seed)
    shapes = [(3, 4), (5,), (2, 3, 2), ()]
    starts = [random.normal(size=shape) * 3 for shape in shapes] + [np.zeros(4)]
    gradients = [[random.normal(size=s.shape) * 10.0**step for s in starts] for step in range(steps)]
    gradients[1][0] = np.zeros_like(starts[0])
    return starts, gradients


def stepped(make: Make, starts: list[Any], gradients: list[list[Any]]) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(torch.tensor(start)) for start in starts]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("name", CASES)
def test_follows_the_equations_of_the_paper_in_float64(name: str) -> None:
    make, equation = CASES[name]
    starts, gradients = arrays(3)
    parameters, _ = stepped(make, starts, gradients)
    for index, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        expected = equations.follow(equation, start, [step[index] for step in gradients])
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


def test_one_step_on_paper() -> None:
    """w = (3, 4), g = (0, 2): |w| = 5, |g| = 2."""

    def of(make: Make) -> list[float]:
        parameters, _ = stepped(make, [np.array([3.0, 4.0])], [[np.array([0.0, 2.0])]])
        return parameters[0].tolist()

    # trust = 0.1 * 5 / (2 + 0.2 * 5) = 1/6; g + d w = (0.6, 2.8)
    for inside in (True, False):
        options: dict[str, Any] = {"eta": 0.1, "weight_decay": 0.2, "lr_in_momentum": inside}
        lars = of(functools.partial(LARS, lr=6.0, **options))
        assert lars == pytest.approx([3 - 0.6, 4 - 2.8], rel=1e-15)
    # m / (1 - b1) = g, v / (1 - b2) = g^2: r = (0, 1), |r| = 1
    lamb = of(lambda p: LAMB(p, 0.1, epsilon=1e-300))  # 0 / 0 has to be 0
    assert lamb == pytest.approx([3.0, 4 - 0.1 * 5], rel=1e-14)
    # g / |g| + d w = (0, 1) + (0.3, 0.4)
    novograd = of(lambda p: NovoGrad(p, 0.5, epsilon=0.0, weight_decay=0.1))
    assert novograd == pytest.approx([3 - 0.15, 4 - 0.7], rel=1e-15)


def test_the_two_forms_of_momentum_part_when_the_rate_changes() -> None:
    """trust=False, momentum 1/2, g = 1; lr 1, then 0: inside the buffer goes on with 1/2, outside stops."""
    for inside, expected in ((True, -1.5), (False, -1.0)):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = LARS([parameter], 1.0, momentum=0.5, trust=False, lr_in_momentum=inside)
        for lr, gradient in ((1.0, 1.0), (0.0, 1.0)):
            optimizer.param_groups[0]["lr"] = lr
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        assert parameter.item() == expected


def test_without_trust_they_are_the_optimizers_of_torch() -> None:
    starts, gradients = arrays(5)
    ours, _ = stepped(lambda p: LAMB(p, 0.01, epsilon=1e-8, trust=False), starts, gradients)
    theirs, _ = stepped(lambda p: torch.optim.AdamW(p, 0.01, eps=1e-8, weight_decay=0.0), starts, gradients)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    ours, _ = stepped(
        lambda p: LARS(p, 0.01, trust=False, weight_decay=0.1, lr_in_momentum=False), starts, gradients
    )
    theirs, _ = stepped(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1), starts, gradients)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


NUMBERS = st.floats(-50, 50).filter(lambda number: abs(number) > 1e-3)
POWERS = st.integers(-20, 20).map(lambda power: 2.0**power)


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=6), POWERS, st.sampled_from(["LARS", "LAMB", "NovoGrad"]))
def test_scaling_the_loss_changes_nothing(values: list[float], scale: float, name: str) -> None:
    """Without decay and epsilon a step knows the direction of its gradients only."""
    make = {
        "LARS": lambda p: LARS(p, 1.0),
        "LAMB": lambda p: LAMB(p, 0.1, epsilon=1e-300),
        "NovoGrad": lambda p: NovoGrad(p, 0.1, epsilon=0.0),
    }[name]
    start, gradients = np.arange(1.0, len(values) + 1), [np.array(values), np.array(values)[::-1].copy()]
    moved = [stepped(make, [start], [[g * factor] for g in gradients])[0] for factor in (1.0, scale)]
    torch.testing.assert_close(*moved, rtol=1e-11, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=6), POWERS)
def test_scaling_the_weights_scales_the_step(values: list[float], scale: float) -> None:
    """LARS and LAMB move a tensor by a share of its norm: w -> s w and g -> g / s give s times the result."""
    start = np.array(values)
    gradients = [np.cos(np.arange(len(values))) + 2, np.sin(np.arange(len(values))) + 2]
    for make in (lambda p: LARS(p, 1.0), lambda p: LAMB(p, 0.1, epsilon=1e-300)):
        (one,), _ = stepped(make, [start], [[g] for g in gradients])
        (other,), _ = stepped(make, [start * scale], [[g / scale] for g in gradients])
        torch.testing.assert_close(one * scale, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=6), st.floats(1e-3, 10.0))
def test_the_first_step_of_lamb_is_a_share_of_the_norm(values: list[float], lr: float) -> None:
    start = np.array(values)
    (moved,), _ = stepped(lambda p: LAMB(p, lr), [start], [[np.full_like(start, 3.0)]])
    distance = float(np.linalg.norm(moved.detach().numpy() - start))
    assert distance == pytest.approx(lr * float(np.linalg.norm(start)), rel=1e-9)


@pytest.mark.parametrize("name", ["LARS", "LAMB", "NovoGrad"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_survives_a_round_trip(name: str, dtype: torch.dtype) -> None:
    make = CASES[name][0]

    def take(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()

    first = [nn.Parameter(torch.linspace(1, 2, 6).to(dtype)), nn.Parameter(torch.ones(2, 2, dtype=dtype))]
    optimizer = make(first)
    take(first, optimizer, 0)
    second = copy.deepcopy(first)
    other = make(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        take(first, optimizer, seed)
        take(second, other, seed)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) and one[key].dtype is two[key].dtype for key in one)


@pytest.mark.parametrize("name", ["LARS", "LAMB", "NovoGrad"])
def test_half_precision_steps_in_float32(name: str) -> None:
    """Small steps add up in the copy: the parameter is the copy rounded, that of a float32 training."""
    make = CASES[name][0]
    half, full = nn.Parameter(torch.full((8,), 1.5).bfloat16()), nn.Parameter(torch.full((8,), 1.5))
    ours, plain = make([half]), make([full])
    for step in range(6):
        gradient = torch.linspace(-1, 1, 8).mul(step + 1).bfloat16()
        half.grad, full.grad = gradient, gradient.float()
        ours.step()
        plain.step()
        assert torch.equal(half, full.bfloat16())
    with torch.no_grad():
        half.fill_(7.0)  # as load_state_dict of a model does
    half.grad = torch.zeros_like(half)
    ours.param_groups[0].update(lr=0.0, momentum=0.0)
    ours.step()
    assert torch.equal(half, torch.full((8,), 7.0).bfloat16())


def test_a_tensor_without_gradient_stays_and_its_steps_are_not_counted() -> None:
    for make, _ in CASES.values():
        still, moving = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        moving.grad = torch.ones(2)
        optimizer = make([still, moving])
        optimizer.step()
        assert still.tolist() == [1.0, 1.0]
        assert still not in optimizer.state
        assert moving.tolist() != [1.0, 1.0]


def test_wrong_values_are_told() -> None:
    one = [nn.Parameter(torch.ones(1))]
    for wrong, word in (
        (lambda: LAMB(one, -1.0), "lr"),
        (lambda: LAMB(one, 1.0, betas=(0.9, 1.0)), "beta2"),
        (lambda: LAMB(one, 1.0, bounds=(2.0, 1.0)), "bounds"),
        (lambda: NovoGrad(one, 1.0, betas=(float("nan"), 0.9)), "beta1"),
        (lambda: NovoGrad(one, 1.0, weight_decay=-0.1), "weight_decay"),
        (lambda: LARS([nn.Parameter(torch.ones(1, dtype=torch.complex64))], 1.0), "complex64"),
    ):
        with pytest.raises(UsageError, match=word):
            wrong()
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        LARS(embedding.parameters(), 1.0).step()

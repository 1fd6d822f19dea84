"""The gradient noise scale, against sums over pairs of samples that know nothing of batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import UsageError
from hora.torch.optim import GradientNoise, noise_of

X = np.random.default_rng(1).normal(size=(12, 3))
Y = np.random.default_rng(2).normal(size=12)


def of_pairs(gradients: list[Any]) -> tuple[float, float]:
    """|G|^2 and tr(S) of batches, without bias: products of different ones, and the variance."""
    count = len(gradients)
    squared = np.mean([np.dot(a, b) for a, b in itertools.permutations(gradients, 2)])
    mean = np.mean(gradients, axis=0)
    return float(squared), float(sum(np.sum((g - mean) ** 2) for g in gradients) / (count - 1))


def gradient(rows: slice, weight: Any) -> Any:
    """Of the mean squared error of a linear model, on these samples."""
    x, y = X[rows], Y[rows]
    return 2 * x.T @ (x @ weight - y) / len(y)


@ranks(1, 2, 4)
def test_it_is_that_of_all_pairs_of_batches() -> None:
    for shard in (None, "optimizer"):
        for declared, passes in ((1, 1), (1, 3), (3, 3)):
            measure(shard, declared, passes)


def measure(shard: Any, declared: int, passes: int) -> None:
    model = nn.Linear(3, 1, bias=False).double()
    start = np.array([0.5, -1.0, 2.0])
    with torch.no_grad():
        model.weight.copy_(torch.tensor(start))
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model, backward_passes_per_step=declared, shard=shard
    )
    noise = GradientNoise(optimizer, global_batch=12, every=2, decay=0.5)
    parts = hora.size() * passes
    size = 12 // parts
    for _ in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            first = (hora.rank() * passes + number) * size
            x, y = torch.tensor(X[first : first + size]), torch.tensor(Y[first : first + size])
            ((model(x).squeeze(1) - y) ** 2).mean().backward()
        noise.update()
        optimizer.step()
    if parts == 1:
        assert math.isnan(noise.scale)
        assert noise.measured == 0
        return
    assert noise.measured == 2  # every second time; both the same, as the rate is 0
    squared, spread = of_pairs([gradient(slice(i * size, (i + 1) * size), start) for i in range(parts)])
    expected = spread * size / squared if squared > 0 else math.inf  # tr(S) is that of one sample
    assert noise.scale == pytest.approx(expected, rel=1e-9)
    if squared > 0:
        steps, samples = noise.cost(12)
        assert (steps - 1) * (samples - 1) == pytest.approx(1.0)  # equation 2.11
    other = GradientNoise(optimizer, global_batch=12)
    other.load_state_dict(noise.state_dict())
    assert other.scale == noise.scale


def test_two_batch_sizes_by_hand() -> None:
    """|G|^2 = 4 and tr(S) = 24: batches of 2 and 8 have 4 + 12 and 4 + 3."""
    assert noise_of(16.0, 7.0, small=2, large=8) == (4.0, 24.0)


@ranks(2)
def test_what_it_cannot_measure_is_refused() -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="plain SGD"):
        GradientNoise(sgd, global_batch=4)
    optimizer = hora.DistributedOptimizer(sgd, model, op=hora.Sum)
    with pytest.raises(UsageError, match="op=S"):
        GradientNoise(optimizer, global_batch=4)
    other = nn.Linear(2, 2)
    average = hora.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
    with pytest.raises(UsageError, match="global_batch"):
        GradientNoise(average, global_batch=0)


@ranks(1, 2)
def test_micro_batches_of_a_loader_are_passes() -> None:
    """A loader's share is averaged already."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    hora.broadcast_parameters(model, root_rank=0)
    start = model.weight.detach().numpy()[0].copy()
    noise = GradientNoise(optimizer, global_batch=12)
    loader = hora.data_loader(
        (torch.tensor(X), torch.tensor(Y)), global_batch=12, micro_batch=2, shuffle=False
    )
    for share in loader:
        optimizer.zero_grad()
        for x, y in share:
            ((model(x).squeeze(1) - y) ** 2).mean().backward()
        noise.update()
    squared, spread = of_pairs([gradient(slice(i, i + 2), start) for i in range(0, 12, 2)])
    assert noise.measured == 1
    assert noise.scale == pytest.approx(spread * 2 / squared if squared > 0 else math.inf, rel=1e-9)

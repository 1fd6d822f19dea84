from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # imported before the ranks are forked
import torch.distributed.tensor
from tests.ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hora.torch as hora
from hora.core.errors import UsageError
from hora.torch.optim import LAMB, ParameterAverage, ema_rule


def test_follows_the_recurrence_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(4.0)
    average = ParameterAverage(model, 0.15)
    expected, values = 4.0, [8.0, 0.0, 2.0]
    for decay, value in zip([1 / 10, 0.15, 0.15], values, strict=True):  # (1 + 0) / 10, then 2 / 11 > 0.15
        expected = decay * expected + (1 - decay) * value
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()
    assert average.averages["weight"].item() == pytest.approx(expected, rel=1e-15)


def test_without_warm_up_it_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ours = ParameterAverage(model, 0.9, warmup=False)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first call copies
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ours.update()
        theirs.update_parameters(model)
    for mine, other in zip(ours.averages.values(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other.data, rtol=1e-6, atol=1e-7)


def test_the_model_gets_its_parameters_back_also_after_an_error() -> None:
    model = nn.Linear(2, 2)
    average = ParameterAverage(model, 0.5, warmup=False)
    with torch.no_grad():
        model.weight.add_(2.0)
    average.update()
    own = model.weight.detach().clone()
    with pytest.raises(KeyError), average.applied():
        assert torch.equal(model.weight, average.averages["weight"])
        raise KeyError
    assert torch.equal(model.weight, own)


def test_half_precision_is_averaged_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = ParameterAverage(model, 0.999, warmup=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(3):
        average.update()  # each adds less than a bfloat16 near 1 can tell
    assert average.averages["weight"].item() == pytest.approx(2 - 0.999**3, rel=1e-6)


def test_the_decay_of_another_batch_forgets_as_much_per_sample() -> None:
    decay = ema_rule(0.999, batch=8, base_batch=2)
    assert decay == pytest.approx(0.999**4, rel=1e-15)
    assert math.isclose(decay**10, 0.999**40)  # 80 samples either way
    with pytest.raises(UsageError, match=r"decay.*1\.0"):
        ParameterAverage(nn.Linear(1, 1), 1.0)


def test_averages_of_another_model_are_refused() -> None:
    average = ParameterAverage(nn.Linear(2, 2))
    state = copy.deepcopy(ParameterAverage(nn.Linear(2, 2, bias=False)).state_dict())
    with pytest.raises(UsageError, match="bias"):
        average.load_state_dict(state)


def train(
    steps: range, *, shard: Any, union: bool, start: Path | None = None, end: Path | None = None
) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer: Any = LAMB(model.parameters(), 0.05)
    if not union:
        optimizer = hora.DistributedOptimizer(optimizer, model, shard=shard)
    average = ParameterAverage(model, 0.8)
    state = {"model": model, "optimizer": optimizer, "average": average}
    if start is not None:
        assert hora.restore(state, directory=start) == steps[0]
    for step in steps:
        x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if not union:
            part = 12 // hora.size()
            x = x[hora.rank() * part : (hora.rank() + 1) * part]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update()
    if end is not None:
        hora.save(state, steps[-1] + 1, directory=end).wait()
    with average.applied():
        values = [parameter.detach().clone() for parameter in model.parameters()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


@pytest.mark.parametrize("shard", [None, "optimizer", "all"])
def test_ranks_average_as_one_worker_and_checkpoints_keep_it(shard: Any, tmp_path: Path) -> None:
    def body() -> None:
        whole = train(range(6), shard=shard, union=True)
        train(range(4), shard=shard, union=False, end=tmp_path)
        resumed = train(range(4, 6), shard=shard, union=False, start=tmp_path)
        for one, other in zip(resumed, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)

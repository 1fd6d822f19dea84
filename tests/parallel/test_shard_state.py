"""The state of a sharded optimizer: how much each rank has, and what goes into checkpoints and back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.shard_net import OPTIMIZERS, loss_of, net, same, same_state, sharded
from tests.ranks import ranks, run_ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import CollectiveError, GradientError

MAKERS = {name: OPTIMIZERS[name] for name in ("momentum", "adam", "nadam", "rprop", "adagrad", "asgd")}


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    )


MODELS: dict[str, list[int]] = {
    "one huge": [100_003, 7, 1, 1, 30],
    "all alike": [997] * 12,
    "many tiny": [1] * 401,
    "huge in the middle": [13, 1, 50_000, 1, 1, 20_011, 5],
}


@pytest.mark.parametrize("bucket_mb", [0.02, 25.0])
@ranks(2, 3, 4)
def test_each_rank_has_its_share_of_the_state(bucket_mb: float) -> None:
    for name, lengths in MODELS.items():
        for make in (torch.optim.Adam, torch.optim.Adagrad):
            parameters = [nn.Parameter(torch.ones(length)) for length in lengths]
            twins = [nn.Parameter(torch.ones(length)) for length in lengths]
            plain: Any = make(twins)
            ours: Any = hora.DistributedOptimizer(make(parameters), shard="optimizer", bucket_mb=bucket_mb)
            for every, optimizer in ((parameters, ours), (twins, plain)):
                torch.cat([each * each for each in every]).sum().backward()
                optimizer.step()
            share = bytes_of(ours) * hora.size() / bytes_of(plain)
            assert 0 < share < 1.05, (name, make.__name__, share)
            total = hora.allreduce(torch.tensor(float(bytes_of(ours))), op=hora.Sum)
            assert float(total) < 1.05 * bytes_of(plain)


def train(model: nn.Module, optimizer: Any, steps: range, *, union: bool) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, union=union, sometimes=step % 2 == 1).backward()
        optimizer.step()


def test_checkpoints_go_between_numbers_of_ranks_and_plain_optimizers(tmp_path: Path) -> None:
    """Trained on 0 ranks (a plain optimizer), 1, 2, 3, ... by turns, it is as if trained by one."""

    def on_ranks(first: int) -> None:
        for name, make in MAKERS.items():
            file = tmp_path / f"{name}-{first}.pt"
            saved = torch.load(tmp_path / f"{name}-{first - 1}.pt")
            model = net()
            model.load_state_dict(saved["model"])
            optimizer = sharded(model, make, bucket_mb=5e-4)
            optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, range(2 * first, 2 * first + 2), union=False)
            state = optimizer.state_dict()
            if hora.rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, file)

    references = {}
    for name, make in MAKERS.items():
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, range(2), union=True)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}-0.pt"
        )
        references[name] = (model, optimizer)
    for number, size in enumerate((2, 4, 1, 3), 1):
        run_ranks(size, on_ranks, number)
    for name, (model, optimizer) in references.items():
        for first in range(2, 10, 2):  # torch rounds some entries when it loads them
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer, range(first, first + 2), union=True)
        model.zero_grad()
        saved = torch.load(tmp_path / f"{name}-4.pt")
        again = net()
        again.load_state_dict(saved["model"])
        same(again, model, tolerance=1e-11)
        plain = MAKERS[name](again.parameters())
        plain.load_state_dict(saved["optimizer"])
        same_state(plain.state_dict(), optimizer.state_dict(), tolerance=1e-11)
        for each, every in ((again, plain), (model, optimizer)):
            train(each, every, range(10, 12), union=True)
        same(again, model, tolerance=1e-11)


@ranks(1, 2, 3)
def test_a_state_that_is_there_already_is_shared_out() -> None:
    for make in MAKERS.values():
        model, reference = net(), net()
        ours, plain = make(model.parameters()), make(reference.parameters())
        train(model, ours, range(2), union=True)
        ours = hora.DistributedOptimizer(ours, model, shard="optimizer", bucket_mb=5e-4)
        train(model, ours, range(2, 4), union=False)
        train(reference, plain, range(4), union=True)
        same(model, reference)
        same_state(ours.state_dict(), plain.state_dict())


@ranks(2, 3)
def test_the_state_can_go_to_one_rank_only() -> None:
    model = net()
    optimizer = sharded(model)
    train(model, optimizer, range(2), union=False)
    everywhere = optimizer.state_dict()
    there = optimizer.state_dict(root_rank=1)
    if hora.rank() == 1:
        same_state(there, everywhere, tolerance=0.0)
    else:
        assert there == everywhere | {"state": {}}


@ranks(2)
def test_loading_gives_new_rates_to_a_schedule_and_runs_hooks() -> None:
    model = net()
    optimizer = sharded(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    saved = optimizer.state_dict()
    train(model, optimizer, range(1), union=False)
    schedule.step()
    called: list[Any] = []
    optimizer.register_load_state_dict_post_hook(called.append)
    optimizer.register_step_post_hook(lambda *_: called.append("step"))
    optimizer.load_state_dict(saved)
    assert called == [optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert not optimizer.state
    train(model, optimizer, range(1), union=False)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert called[1:] == ["step"]


@ranks(2)
def test_copies_are_refused() -> None:
    optimizer = sharded(net())
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(GradientError, match="state_dict"):
            copying(optimizer)


@ranks(2)
def test_broadcasting_the_state() -> None:
    model = net()
    optimizer = sharded(model)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + hora.rank())
    hora.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2
    train(model, optimizer, range(1), union=False)
    with pytest.raises(CollectiveError, match="load_state_dict"):
        hora.broadcast_optimizer_state(optimizer)

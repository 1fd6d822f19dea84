"""LARS, LAMB and NovoGrad on several ranks: as one worker, also where each rank has parts of the tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # imported before the ranks are forked
import torch.distributed.tensor
from tests.parallel.shard_net import Make, loss_of, net, same, same_state
from tests.parallel.test_shard_all import Layers
from tests.parallel.test_shard_all import loss_of as loss_of_layers
from tests.ranks import ranks, run_ranks
from torch import nn

import hora.torch as hora
from hora.torch.optim import LAMB, LARS, NovoGrad, decay_groups

MAKE: dict[str, Make] = {
    "LARS": lambda m: LARS(decay_groups(m, weight_decay=0.05), 1.0, eta=0.05),
    "LARS, lr outside": lambda m: LARS(m.parameters(), 1.0, eta=0.05, lr_in_momentum=False),
    "LAMB": lambda m: LAMB(decay_groups(m, weight_decay=0.05), 0.02, bounds=(0.0, 2.0)),
    "NovoGrad": lambda m: NovoGrad(m.parameters(), 0.02, weight_decay=0.01),
}


@ranks(2, 3, 4)
def test_shares_of_the_optimizer() -> None:
    for name, make in MAKE.items():
        for shard, bucket_mb in ((None, 25.0), ("optimizer", 25.0), ("optimizer", 0.0002)):
            model, reference = net(), net()
            distributed = hora.DistributedOptimizer(make(model), model, shard=shard, bucket_mb=bucket_mb)
            plain = make(reference)
            _train(model, distributed, range(3), union=False)
            _train(reference, plain, range(3), union=True)
            same(model, reference)
            state = distributed.state_dict()
            same_state(state, plain.state_dict())
            # A checkpoint of one is the other's.
            model, reference = copy.deepcopy(reference), net()
            reference.load_state_dict(model.state_dict())
            again = hora.DistributedOptimizer(make(model), model, shard=shard, bucket_mb=bucket_mb)
            again.load_state_dict(copy.deepcopy(plain.state_dict()))
            plain = make(reference)
            plain.load_state_dict(copy.deepcopy(state))
            _train(model, again, range(3, 5), union=False)
            _train(reference, plain, range(3, 5), union=True)
            same(model, reference)
            if shard and hora.size() > 1:
                own = sum(value.numel() for each in again.state.values() for value in each.values())
                whole = sum(value.numel() for each in plain.state.values() for value in each.values())
                assert own < whole, name


@ranks(2, 3)
def test_parameters_that_are_spread() -> None:
    for make in MAKE.values():
        torch.manual_seed(0)
        model: Any = Layers()
        reference = copy.deepcopy(model)
        spread = hora.DistributedOptimizer(make(model), model, shard="all")
        plain = make(reference)
        for trained, optimizer, union in ((model, spread, False), (reference, plain, True)):
            for step in range(4):
                optimizer.zero_grad()
                loss_of_layers(trained, step, union=union).backward()
                optimizer.step()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(one.full_tensor(), other, rtol=1e-12, atol=1e-12)
        same_state(spread.state_dict(), plain.state_dict())


@ranks(2)
def test_half_precision_parameters_in_shares() -> None:
    """Also the float32 copies are shared out, and a checkpoint holds them in float32."""
    model, reference = (nn.Linear(6, 3).bfloat16() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    hora.broadcast_parameters(model, root_rank=0)
    hora.broadcast_parameters(reference, root_rank=0)
    ours = hora.DistributedOptimizer(LAMB(model.parameters(), 1e-3), model, shard="optimizer")
    plain = LAMB(reference.parameters(), 1e-3)
    for step in range(4):
        for trained, optimizer in ((model, ours), (reference, plain)):
            optimizer.zero_grad()
            x = torch.full((2, 6), step + 1.0, dtype=torch.bfloat16)
            trained(x).float().square().mean().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)
    state = ours.state_dict()["state"]
    assert {value.dtype for each in state.values() for value in each.values()} == {torch.float32}
    same_state(ours.state_dict(), plain.state_dict(), tolerance=1e-6)


def _train(model: Any, optimizer: Any, steps: range, *, union: bool) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, union=union, sometimes=step != 1).backward()
        optimizer.step()


def test_checkpoints_go_between_numbers_of_ranks(tmp_path: Path) -> None:
    """The network has a parameter without elements too, which every rank has and which lies nowhere."""
    made: dict[str, Make] = MAKE | {"AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01)}
    for name in ("NovoGrad", "LAMB", "AdamW"):
        whole = run_ranks(1, _trained, made[name], "plain", range(5))[0]
        saved = tmp_path / name
        run_ranks(3, _trained, made[name], "optimizer", range(3), saved)
        for size, shard in ((2, "optimizer"), (1, None)):
            for found in run_ranks(size, _trained, made[name], shard, range(3, 5), saved):
                torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def _trained(make: Make, shard: Any, steps: range, place: Path | None = None) -> list[torch.Tensor]:
    model = net()
    optimizer: Any = make(model)
    if shard != "plain":
        optimizer = hora.DistributedOptimizer(optimizer, model, shard=shard)
    state = {"model": model, "optimizer": optimizer}
    if steps[0]:
        assert hora.restore(state, directory=place) == steps[0]
    _train(model, optimizer, steps, union=shard == "plain")
    if place is not None and not steps[0]:
        hora.save(state, steps[-1] + 1, directory=place).wait()
    return [parameter.detach() for parameter in model.parameters()]

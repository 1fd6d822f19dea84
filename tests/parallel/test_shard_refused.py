"""What does not go with shard="optimizer" is refused, with a reason, before anything is changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.parallel.shard_net import OPTIMIZERS, loss_of, net, sharded
from tests.ranks import ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import CollectiveError, GradientError
from hora.torch.optim import LAMB, LARS, NovoGrad
from hora.torch.shard._elementwise import scalar_keys


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have, of each element by itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(torch.sign(0.9 * average + 0.1 * p.grad), alpha=group["lr"])
                    average.mul_(0.99).add_(p.grad, alpha=0.01)


class Lamb(Lion):
    """One with norms of tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() / p.grad.norm(), alpha=group["lr"])


class Clipping(Lion):
    """One with a norm of all tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.sub_(p.grad / (1 + norm), alpha=0.1)


class ByShape(Lion):
    """One that decays matrices only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad + (0.1 * p if p.dim() > 1 else 0), alpha=0.1)


class Wrapping(torch.optim.SGD):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, lr=0.1)
        self.base = base


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


REFUSED: dict[str, Any] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Lamb": Lamb,
    "Clipping": Clipping,
    "ByShape": ByShape,
    "Wrapping": lambda p: Wrapping(torch.optim.SGD(p, lr=0.1)),
    "Noisy": Noisy,
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_need_whole_tensors_are_found_out(name: str) -> None:
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    drawn = torch.get_rng_state()
    with pytest.raises(GradientError, match=rf"{name} does not go with shard='optimizer'.*whole|parts"):
        scalar_keys(REFUSED[name](list(model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())


def test_muon_is_refused() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    with pytest.raises(GradientError, match="Muon does not go"):
        scalar_keys(torch.optim.Muon([nn.Parameter(torch.ones(4, 5))], lr=0.1))


def test_steps_of_single_elements_are_taken_for_what_they_are() -> None:
    for name, make in OPTIMIZERS.items():
        optimizer = make(net().parameters())
        drawn = torch.get_rng_state()
        scalars = scalar_keys(optimizer)
        assert ("step" in scalars) == (name not in SIMPLE), name
        assert not any(optimizer.state.get(p, {}).get("exp_avg") is not None for p in net().parameters())
        assert torch.equal(drawn, torch.get_rng_state())
    assert scalar_keys(Lion(net().parameters())) == set()
    warming = torch.optim.AdamW(net().parameters(), lr=0.0)
    assert scalar_keys(warming) == {"step"}
    assert warming.param_groups[0]["lr"] == 0.0
    # A rate of 0 hides nothing.
    with pytest.raises(GradientError, match="Lamb"):
        scalar_keys(Lamb(net().parameters(), lr=0.0))
    # Those that ask for the norms of whole tensors are answered them.
    assert scalar_keys(LARS(net().parameters(), lr=0.1)) == set()
    assert scalar_keys(LAMB(net().parameters(), lr=0.1)) == {"step"}
    assert scalar_keys(NovoGrad(net().parameters(), lr=0.1)) == {"exp_avg_sq"}


SIMPLE = ("sgd", "momentum", "nesterov", "maximize", "sgd-foreach", "sgd-fused")


@ranks(1, 2)
def test_an_optimizer_that_torch_does_not_have_is_sharded() -> None:
    model, reference = net(), net()
    ours, plain = sharded(model, Lion), Lion(reference.parameters())
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(model, step).backward()
        loss_of(reference, step, union=True).backward()
        ours.step()
        plain.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    assert ours.param_groups[0]["steps"] == 3


@ranks(1, 2)
def test_arguments_that_need_whole_gradients_are_refused() -> None:
    for options, word in (
        ({"op": hora.Adasum}, "Adasum"),
        ({"compression": hora.PowerSGD()}, "PowerSGD"),
        ({"compression": hora.TopK()}, "TopK"),
        ({"shard": "gradients"}, "not known"),
    ):
        model = net()
        kinds = {"shard": "optimizer"} | options
        with pytest.raises(GradientError, match=word):
            hora.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, **kinds)


@ranks(2)
def test_ranks_that_do_not_all_shard_are_told() -> None:
    model = net()
    with pytest.raises(GradientError, match="shard='optimizer'"):
        hora.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()), model, shard="optimizer" if hora.rank() else None
        )


@ranks(2)
def test_parameters_with_the_same_memory_are_refused() -> None:
    data = torch.ones(10)
    parameters = [nn.Parameter(data[:6]), nn.Parameter(data[4:])]
    with pytest.raises(GradientError, match="same memory"):
        hora.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), shard="optimizer")


@ranks(2)
def test_sparse_and_differentiable_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = sharded(model, OPTIMIZERS["sgd"])
    with pytest.raises(GradientError, match="sparse"):
        model(torch.tensor([1])).sum().backward()
    del optimizer
    optimizer = sharded(model, OPTIMIZERS["sgd"], sparse_as_dense=True)
    model.zero_grad()
    before = model.weight.detach().clone()
    model(torch.tensor([hora.rank()])).sum().backward()
    optimizer.step()
    before[:2] -= 0.05 / 2
    assert torch.allclose(model.weight, before)


@ranks(2)
def test_a_model_that_is_converted_afterwards_is_refused() -> None:
    model = net()
    optimizer = sharded(model)
    model.float()
    loss = model(torch.ones(2, 6)).sum()
    with pytest.raises(GradientError, match=r"has become torch\.float32"):
        loss.backward()
        optimizer.step()


@ranks(2)
def test_one_more_backward_and_other_steps_are_found() -> None:
    model = net()
    optimizer = sharded(model, backward_passes_per_step=2)
    for step in range(2):
        loss_of(model, step).backward()
    with pytest.raises(GradientError, match="backward pass more"):
        loss_of(model, 2).backward()
    optimizer.zero_grad()


@ranks(2)
def test_gradients_of_an_optimizer_that_is_gone_are_refused() -> None:
    model = net()
    optimizer = sharded(model)
    loss_of(model, 0).backward()
    del optimizer
    gc.collect()
    optimizer = sharded(model)
    with pytest.raises(GradientError, match="is gone"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()


@ranks(2)
def test_join_is_refused_on_all_ranks() -> None:
    model = net()
    optimizer = sharded(model)
    with pytest.raises(CollectiveError, match="shard="):
        if hora.rank() == 0:
            hora.join()
        loss_of(model, 0).backward()
        optimizer.step()

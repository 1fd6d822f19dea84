"""op=Adasum: local steps, whose changes are combined as the formula says, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def loss_of(net: torch.nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    loss: torch.Tensor = net(torch.randn(3, 6, generator=generator, dtype=torch.float64)).square().mean()
    return loss


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equation 2 of arXiv:2006.02924, on vectors none of which is zero."""
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def tree(changes: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, then pairs of pairs."""
    while len(changes) > 1:
        changes = [pair(a, b) for a, b in zip(changes[::2], changes[1::2], strict=True)]
    return changes[0]


def reference(
    make: Make, size: int, *, steps: int, passes: int = 1, clip: float | None = None
) -> list[torch.Tensor]:
    """All ranks, one after another: each has a net and an optimizer's state of its own."""
    nets = [model() for _ in range(size)]
    optimizers = [make(net.parameters()) for net in nets]
    for step in range(steps):
        starts = [parameter.detach().clone() for parameter in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            torch.stack(
                [loss_of(net, step, passes * rank + each) for each in range(passes)]
            ).mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        with torch.no_grad():
            for start, *own in zip(starts, *(net.parameters() for net in nets), strict=True):
                new = start + tree([parameter - start for parameter in own])
                for parameter in own:
                    parameter.copy_(new)
    return [parameter.detach() for parameter in nets[0].parameters()]


def train(optimizer_of: Any, *, steps: int, passes: int = 1, clip: float | None = None) -> list[torch.Tensor]:
    net = model()
    optimizer = optimizer_of(net)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(net, step, passes * hora.rank() + each).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def adasum(make: Make, **options: Any) -> Any:
    return lambda net: hora.DistributedOptimizer(make(net.parameters()), net, op=hora.Adasum, **options)


def close(own: list[torch.Tensor], other: list[torch.Tensor], bound: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in zip(own, other, strict=True))


@ranks(1, 2, 4)
def test_local_steps_are_combined() -> None:
    size = hora.size()
    for make in MAKERS.values():
        result = train(adasum(make), steps=4)
        assert close(result, reference(make, size, steps=4))
        assert all(torch.equal(tensor, hora.broadcast(tensor, 0)) for tensor in result)
    for passes, clip in ((1, 0.1), (3, 0.1)):
        result = train(
            adasum(MAKERS["sgd"], backward_passes_per_step=passes), steps=3, passes=passes, clip=clip
        )
        assert close(result, reference(MAKERS["sgd"], size, steps=3, passes=passes, clip=clip))


@ranks(2, 4)
def test_all_ranks_get_the_same_bits() -> None:
    """Also where one rank has a vector at a memory address of another alignment than the other."""
    generator = torch.Generator().manual_seed(hora.rank())
    for count in (1, 3, 5, 17, 31, 58):
        for dtype in (torch.float32, torch.float64):
            tensors = [torch.randn(count, generator=generator, dtype=dtype) for _ in range(3)]
            for result in hora.grouped_allreduce(tensors, op=hora.Adasum):
                assert hora.allgather(result[None]).unique(dim=0).shape[0] == 1


@ranks(2)
def test_half_precision_on_the_way() -> None:
    for compression, bound in ((hora.Compression.fp16, 2e-3), (hora.Compression.bf16, 2e-2)):
        result = train(adasum(MAKERS["sgd"], compression=compression), steps=2)
        assert close(result, reference(MAKERS["sgd"], 2, steps=2), bound)
        assert all(torch.equal(tensor, hora.broadcast(tensor, 0)) for tensor in result)


@ranks(2)
def test_equal_changes_are_averaged_and_orthogonal_ones_added() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hora.Adasum)
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    optimizer.step()
    assert weight.tolist() == [-3, -4]
    weight.grad = torch.zeros(2, dtype=torch.float64)
    weight.grad[hora.rank()] = 1
    optimizer.step()
    assert weight.tolist() == [-4, -5]


@ranks(2)
def test_a_parameter_without_a_gradient_on_a_rank_counts_for_nothing() -> None:
    weight, other, never = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD([weight, other, never], lr=0.5), op=hora.Adasum)
    loss = weight.sum() if hora.rank() == 0 else other.sum()
    loss.backward()
    assert (other.grad is None) == (hora.rank() == 0)  # gradients stay each rank's own
    optimizer.step()
    assert weight.tolist() == other.tolist() == [0.5] * 3
    assert never.tolist() == [1] * 3


@ranks(2)
def test_sparse_gradients_half_parameters_and_closures() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(4, 2, sparse=True)
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD([table.weight, half], lr=1.0), op=hora.Adasum)
    before = table.weight.detach().clone()
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = table(torch.tensor([hora.rank()])).sum() + half.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [1]
    assert float(loss.detach()) == float(before[hora.rank()].sum() + 2)  # this rank's own
    expected = before.clone()
    expected[:2] -= 1  # each rank has changed another row
    assert torch.allclose(table.weight, expected, rtol=1e-6)
    assert half.tolist() == [0, 0]


@ranks(4)
def test_a_process_set_combines_by_itself() -> None:
    some = hora.add_process_set([0, 1])
    result = train(adasum(MAKERS["sgd"], process_set=some), steps=3)
    if some.included():
        assert close(result, reference(MAKERS["sgd"], 2, steps=3))
    else:
        plain = functools.partial(train, lambda net: MAKERS["sgd"](net.parameters()), steps=3)
        assert close(result, plain(), 0)


@ranks(3)
def test_three_ranks_are_refused() -> None:
    net = model()
    with pytest.raises(CollectiveError, match=r"which 3 ranks do not allow. Start 2, 4, 8"):
        hora.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, op=hora.Adasum)
    hora.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)  # nothing was attached


@ranks(2)
def test_complex_parameters_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CollectiveError, match="no Adasum of complex128"):
        hora.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), op=hora.Adasum)

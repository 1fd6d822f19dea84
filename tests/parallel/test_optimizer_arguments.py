"""What DistributedOptimizer is told beyond the optimizer: passes, operation, compression, process sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError, GradientError


def model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)
    ).double()


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def train(optimizer_of: Any, parts: list[list[int]], *, steps: int = 3) -> list[torch.Tensor]:
    """Train on batches ``parts[pass]`` in each step, whose losses are meant over each list."""
    net = model()
    optimizer = optimizer_of(net)
    for step in range(steps):
        optimizer.zero_grad()
        for own in parts:
            torch.stack([net(batch(step, part)).square().mean() for part in own]).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def close(own: list[torch.Tensor], other: list[torch.Tensor], bound: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in zip(own, other, strict=True))


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def distributed(plain: Any, **options: Any) -> Any:
    return lambda net: hora.DistributedOptimizer(plain(net), net.named_parameters(), **options)


@ranks(1, 2, 3)
def test_passes_are_meant_over_passes_and_ranks() -> None:
    size, rank = hora.size(), hora.rank()
    for plain in (sgd, adam):
        everything = list(range(4 * size))
        expected = train(plain, [everything])
        own = [[4 * rank + passing] for passing in range(4)]
        assert close(train(distributed(plain, backward_passes_per_step=4), own), expected)
        # A step after fewer passes takes the mean of those.
        fewer = train(plain, [[4 * r + passing for r in range(size) for passing in (0, 1)]])
        assert close(train(distributed(plain, backward_passes_per_step=4), own[:2]), fewer)


@ranks(2)
def test_gradients_are_reduced_in_the_last_pass_only() -> None:
    net = model()
    optimizer = hora.DistributedOptimizer(sgd(net), net, backward_passes_per_step=2)
    first = next(net.parameters())
    net(batch(0, hora.rank())).mean().backward()
    assert first.grad is not None
    assert hora.allgather(first.grad[None]).unique(dim=0).shape[0] == 2  # still each rank's own
    net(batch(1, hora.rank())).mean().backward()
    assert hora.allgather(first.grad[None]).unique(dim=0).shape[0] == 1
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with pytest.raises(GradientError, match="A backward pass more than backward_passes_per_step=2"):
        net(batch(2, hora.rank())).mean().backward()
    optimizer.zero_grad()
    net(batch(2, hora.rank())).mean().backward()
    net(batch(3, hora.rank())).mean().backward()
    optimizer.step()


@ranks(1, 2, 3)
def test_sum_adds_the_ranks_gradients() -> None:
    size, rank = hora.size(), hora.rank()

    def slower(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.01)

    def faster(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.01 * size)

    expected = train(faster, [list(range(size))])
    assert close(train(distributed(slower, op=hora.Sum), [[rank]]), expected)
    if size > 1:
        with pytest.raises(GradientError, match="op=hora.Sum"):
            train(distributed(slower, op=hora.Sum), [[rank], [rank]])


@ranks(2)
def test_arguments_that_change_nothing_in_exact_arithmetic() -> None:
    size, rank = hora.size(), hora.rank()
    expected = train(adam, [list(range(size))])
    for options in (
        {"gradient_predivide_factor": 2.5},
        {"num_groups": 2},
        {"groups": 3},
        {"sparse_as_dense": True},
    ):
        assert close(train(distributed(adam, **options), [[rank]]), expected)
    for compression, bound in (
        (hora.Compression.none, 1e-12),
        (hora.Compression.fp16, 2e-2),
        (hora.Compression.bf16, 5e-2),
    ):
        result = train(distributed(sgd, compression=compression), [[rank]])
        assert close(result, train(sgd, [list(range(size))]), bound)
        assert close(result, [hora.broadcast(tensor, 0) for tensor in result], 0)


@ranks(2)
def test_synchronize_then_step_averages_once() -> None:
    net = model()
    optimizer: Any = hora.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, op=hora.Sum)
    before = net[0].weight.detach().clone()
    net(batch(0, hora.rank())).mean().backward()
    optimizer.synchronize()
    assert net[0].weight.grad is not None
    gradient = net[0].weight.grad.clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(net[0].weight, before - gradient, rtol=0, atol=1e-15)


@ranks(2)
def test_sparse_gradients_become_dense() -> None:
    def table(sparse: bool) -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64)

    own, plain = table(sparse=True), table(sparse=False)
    optimizer = hora.DistributedOptimizer(sgd(own), own, sparse_as_dense=True)
    alone = sgd(plain)
    for _ in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        own(torch.tensor([hora.rank(), 4])).square().sum().backward()
        plain(torch.tensor([0, 4, 1, 4])).square().sum().div(2).backward()
        optimizer.step()
        alone.step()
    assert torch.allclose(own.weight, plain.weight, rtol=1e-12)
    other = table(sparse=True)
    refusing = hora.DistributedOptimizer(sgd(other), other)
    with pytest.raises(GradientError, match="sparse_as_dense=True"):
        other(torch.tensor([1])).sum().backward()
    refusing.zero_grad()


@ranks(3)
def test_a_process_set_averages_by_itself() -> None:
    rank = hora.rank()
    pair = hora.add_process_set([0, 2])
    result = train(distributed(adam, process_set=pair), [[rank]])
    assert close(result, train(adam, [[0, 2] if pair.included() else [1]]))


@ranks(2)
def test_compressors_that_send_everything_change_nothing() -> None:
    size, rank = hora.size(), hora.rank()
    expected = train(sgd, [list(range(size))])
    assert close(train(distributed(sgd, compression=hora.TopK(1.0)), [[rank]]), expected)
    # Rank 4 is the full rank of every matrix that is compressed at all, but (4, 1) and (5, 4) are not.
    assert close(train(distributed(sgd, compression=hora.PowerSGD(6)), [[rank]]), expected)


@ranks(1, 2, 3)
def test_what_is_left_out_is_sent_later() -> None:
    """The sum of what was received plus the errors that wait is the sum of all gradients."""
    size, rank = hora.size(), hora.rank()
    for compression in (hora.TopK(0.05), hora.PowerSGD(1)):
        received = torch.zeros(8, 9, dtype=torch.float64)
        total = torch.zeros(8, 9, dtype=torch.float64)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            all_gradients = torch.randn(size, 8, 9, generator=generator, dtype=torch.float64)
            mine = all_gradients[rank].clone()
            compression.exchange([mine], ["weight"], hora.global_process_set.group)
            assert torch.equal(mine, hora.broadcast(mine, 0))
            received += mine
            total += all_gradients.sum(0)
            waiting = hora.allreduce(compression._errors["weight"], op=hora.Sum)
            assert torch.allclose(received + waiting, total, rtol=1e-12, atol=1e-12)
            if isinstance(compression, hora.PowerSGD):
                assert torch.linalg.matrix_rank(mine) == 1
            else:
                assert mine.count_nonzero() <= 4 * size  # 5 % of 72 elements from each rank


@ranks(2)
def test_compressed_training_reaches_the_target() -> None:
    """Least squares with error feedback comes to the same solution as without compression."""
    torch.manual_seed(0)
    truth = torch.randn(12, 6, dtype=torch.float64)
    x = torch.randn(64, 12, dtype=torch.float64)
    mine = x[hora.rank() :: 2]
    for compression in (hora.TopK(0.25), hora.PowerSGD(2)):
        weight = torch.nn.Parameter(torch.zeros(12, 6, dtype=torch.float64))
        optimizer = hora.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), compression=compression)
        for _ in range(400):
            optimizer.zero_grad()
            (mine @ weight - mine @ truth).square().sum(1).mean().backward()
            optimizer.step()
        assert (weight - truth).norm() < 1e-3 * truth.norm()


@ranks(2)
def test_arguments_without_a_meaning_are_refused() -> None:
    net = model()
    for options, match in (
        ({"op": hora.Max}, "Average, Sum or Adasum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"gradient_predivide_factor": 2.0, "op": hora.Sum}, "goes with op=Average"),
        ({"op": hora.Adasum, "compression": hora.TopK()}, "does not go with TopK"),
    ):
        with pytest.raises(GradientError, match=match):
            hora.DistributedOptimizer(sgd(net), net, **options)  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match="was not added"):
        hora.DistributedOptimizer(sgd(net), net, process_set=hora.ProcessSet([0]))
    with pytest.raises(GradientError, match="ratio=0"):
        hora.TopK(0)
    with pytest.raises(GradientError, match="rank=0"):
        hora.PowerSGD(0)

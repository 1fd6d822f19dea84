"""Gradients of collectives against autograd through one process that holds all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.torch import _execute, _request

Tensors = list[torch.Tensor]


def inputs(rows: list[int]) -> Tensors:
    """One tensor per rank, the same on all ranks."""
    made = []
    for rank, count in enumerate(rows):
        generator = torch.Generator().manual_seed(rank)
        made.append(torch.randn(count, 3, generator=generator, dtype=torch.float64).requires_grad_())
    return made


def loss(output: torch.Tensor, rank: int) -> torch.Tensor:
    """Another loss on each rank."""
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).reshape(output.shape).cos()
    return ((rank + 1) * weights * output.square()).sum()


def check(
    rows: list[int],
    distributed: Callable[[torch.Tensor], torch.Tensor],
    alone: Callable[[Tensors], Tensors],
) -> None:
    """The ranks' gradients are those of the sum of their losses."""
    rank = hora.rank()
    everyone = inputs(rows)
    total = torch.stack([loss(output, other) for other, output in enumerate(alone(everyone))]).sum()
    expected = torch.autograd.grad(total, everyone[rank], materialize_grads=True)[0]
    mine = inputs(rows)[rank]
    loss(distributed(mine), rank).backward()
    assert mine.grad is not None
    assert torch.allclose(mine.grad, expected, rtol=1e-12, atol=1e-12)


@ranks(1, 2, 3)
def test_gradients_are_those_of_the_sum_of_the_losses() -> None:
    size, rank = hora.size(), hora.rank()
    even = [4] * size
    check(even, hora.allreduce, lambda xs: [torch.stack(xs).mean(0)] * size)
    check(
        even,
        lambda x: hora.allreduce(x, op=hora.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [torch.stack(xs).sum(0) * 1.5] * size,
    )
    check(even, lambda x: hora.allreduce(x, op=hora.Max), lambda xs: [torch.stack(xs).amax(0)] * size)
    check(
        even,
        lambda x: hora.allreduce(x, op=hora.Min, postscale_factor=2.0),
        lambda xs: [2 * torch.stack(xs).amin(0)] * size,
    )
    check(
        even,
        lambda x: torch.cat(hora.grouped_allreduce([x, 2 * x], op=hora.Sum)),
        lambda xs: [torch.cat([sum(xs), 2 * sum(xs)])] * size,  # type: ignore[list-item]
    )
    uneven = [1, 0, 3][:size]
    check(uneven, hora.allgather, lambda xs: [torch.cat(xs)] * size)
    check(
        uneven,
        lambda x: torch.cat(hora.grouped_allgather([x, x[:1] * 2])),
        lambda xs: [torch.cat([*xs, *(2 * x[:1] for x in xs)])] * size,
    )
    for root in range(size):
        check(even, lambda x, root=root: hora.broadcast(x, root), lambda xs, root=root: [xs[root]] * size)
    splits = [[a + b for b in range(size)] for a in range(size)]
    check(
        [sum(row) for row in splits],
        lambda x: hora.alltoall(x, splits=splits[rank])[0],
        lambda xs: [torch.cat([torch.split(xs[a], splits[a])[b] for a in range(size)]) for b in range(size)],
    )
    shares = [5 // size + (place < 5 % size) for place in range(size)]
    for op, factor in ((hora.Sum, 1.0), (hora.Average, 1 / size)):
        check(
            [5] * size,
            lambda x, op=op: hora.reducescatter(x, op=op, prescale_factor=2.0),
            lambda xs, f=factor: list(torch.split(2 * f * torch.stack(xs).sum(0), shares)),
        )
        check(
            [5] * size,
            lambda x, op=op: hora.grouped_reducescatter([x], op=op)[0],
            lambda xs, f=factor: list(torch.split(f * torch.stack(xs).sum(0), shares)),
        )


@ranks(2)
def test_more_about_gradients() -> None:
    rank = hora.rank()
    # The second derivative: d/dx of (2 sum over ranks x^2) is taken through the collective again.
    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(hora.allreduce(x**3, op=hora.Sum).sum(), x, create_graph=True)
    assert first.tolist() == [2 * 3 * (1.0 + rank) ** 2]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [2 * 6 * (1.0 + rank)]
    # A number without dimensions, half precision, compression, and nothing to differentiate.
    y = torch.tensor(2.0, requires_grad=True)
    hora.allgather(y).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == 2.0
    z = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    hora.allreduce(z, op=hora.Sum).sum().backward()
    assert z.grad is not None
    assert z.grad.dtype == torch.bfloat16
    w = torch.ones(3, requires_grad=True)
    hora.allreduce(w, op=hora.Sum, compression=hora.Compression.fp16).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0] * 3
    with torch.no_grad():
        assert not hora.allreduce(w).requires_grad
    assert not hora.synchronize(hora.allreduce_async(w)).requires_grad
    # In place: values change, history does not.
    hora.allreduce_(w, op=hora.Sum)
    assert w.tolist() == [2.0] * 3
    assert w.is_leaf
    equal = torch.ones(2, requires_grad=True)  # ties share the gradient
    hora.allreduce(equal, op=hora.Max).sum().backward()
    assert equal.grad is not None
    assert equal.grad.tolist() == [1.0, 1.0]
    with pytest.raises(CollectiveError, match="Product has no gradient"):
        hora.allreduce(w, op=hora.Product).sum().backward()
    with pytest.raises(CollectiveError, match="Max has no gradient"):
        hora.reducescatter(w, op=hora.Max).sum().backward()


class AsHorovod:
    as_horovod = True

    def submit(self, request: _request.Request) -> _request.Work:
        return _execute.native.submit(request)


@ranks(2, 3)
def test_a_dispatcher_as_horovod_gets_its_factors() -> None:
    """allgather and broadcast average, reducescatter by Sum multiplies by the number of ranks."""
    size, rank = hora.size(), hora.rank()
    _request.use(AsHorovod())
    x = torch.ones(2, requires_grad=True)
    (g,) = torch.autograd.grad((hora.allgather(x) * (rank + 1)).sum(), x)
    assert torch.allclose(g, torch.full((2,), (size + 1) / 2))
    (g,) = torch.autograd.grad((hora.broadcast(x, 1) * (rank + 1)).sum(), x)
    assert torch.allclose(g, torch.full((2,), (size + 1) / 2 if rank == 1 else 0.0))
    y = torch.ones(size, requires_grad=True)
    for op, factor in ((hora.Sum, size), (hora.Average, 1)):
        (g,) = torch.autograd.grad((hora.reducescatter(y, op=op) * (rank + 1)).sum(), y)
        assert g.tolist() == [factor * (place + 1.0) for place in range(size)]
    assert hora.allreduce(torch.tensor([-3, 3]) * (rank + 1), op=hora.Average).tolist() == [
        int(-3 * (size + 1) / 2),  # truncated
        int(3 * (size + 1) / 2),
    ]
    for dtype in (torch.int8, torch.uint8):  # the sum is wider than the average
        assert hora.allreduce(torch.tensor([120], dtype=dtype)).tolist() == [120]
        assert hora.reducescatter(torch.full((size,), 120, dtype=dtype)).tolist() == [120]
    _request.use(None)

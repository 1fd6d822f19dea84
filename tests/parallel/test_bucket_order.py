"""Buckets follow the order in which the first backward makes the gradients, however they are registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.ranks import ranks, run_ranks
from torch import nn

import hora.torch as hora
from hora.torch import _buckets
from hora.torch._ready import Readiness
from hora.torch._reducer import Reducer

LAYERS = 8
USE = (3, 6, 0, 7, 1, 5, 2, 4)
"""In which order the forward pass uses the layers, by the numbers under which they are registered."""

WIDTH = 16
BUCKET = 2 * (WIDTH * WIDTH + WIDTH) * 4 / 2**20
"""MB of two layers in float32."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", BUCKET / 2)


class Net(nn.Module):
    """Layers that are not used in the order in which they are registered, nor all of them."""

    def __init__(self, use: Sequence[int] = USE) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.use:
            x = torch.tanh(self.layers[number](x))
        return x

    def loss(self, step: int, rank: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + (hora.rank() if rank is None else rank))
        return self(torch.randn(3, WIDTH, generator=generator)).square().mean()


def distributed(net: Net, **options: Any) -> Any:
    options = {"bucket_mb": BUCKET} | options
    sgd = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.5, momentum=0.9)
    return hora.DistributedOptimizer(sgd, **options)


def step(net: Net, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    net.loss(number).backward()
    optimizer.step()


def watched(net: Net, monkeypatch: pytest.MonkeyPatch) -> list[int | tuple[int, ...]]:
    """The layer of each weight whose gradient is there, and of each bucket that leaves, its layers."""
    happened: list[int | tuple[int, ...]] = []
    numbers = {id(each): number for number, layer in enumerate(net.layers) for each in layer.parameters()}
    for number, layer in enumerate(net.layers):
        # Before the optimizer's own hooks, which send buckets off.
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: happened.append(number))
    launch = Reducer._launch

    def noted(self: Reducer, bucket: _buckets.Bucket, **rest: Any) -> None:
        happened.append(tuple(sorted({numbers[id(each)] for each in bucket.parameters})))
        launch(self, bucket, **rest)

    monkeypatch.setattr(Reducer, "_launch", noted)
    return happened


def buckets_of(happened: Sequence[int | tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [each for each in happened if isinstance(each, tuple)]


@pytest.mark.parametrize("options", [{}, {"compression": hora.Compression.bf16}, {"op": hora.Sum}])
@ranks(2, 3)
def test_buckets_hold_what_is_ready_together(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    net = Net()
    happened = watched(net, monkeypatch)
    optimizer = distributed(net, **options)
    for number in range(3):
        del happened[:]
        step(net, optimizer, number)
        backwards = list(reversed(USE))
        expected = [tuple(backwards[:1]), *(tuple(sorted(backwards[i : i + 2])) for i in range(1, LAYERS, 2))]
        assert buckets_of(happened) == expected
        # In the first step nothing leaves before the order is known; later the first bucket leaves at once.
        assert happened.index(expected[0]) == (LAYERS if number == 0 else 1)


def layers_before_the_first_bucket(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of eight that are registered from the last to the first, in buckets of four, in the second step."""
    net = Net((7, 6, 5, 4, 3, 2, 1, 0))
    happened = watched(net, monkeypatch)
    optimizer = distributed(net, bucket_mb=2 * BUCKET)
    for number in range(2):
        del happened[:]
        step(net, optimizer, number)
    return happened.index(buckets_of(happened)[0])


@ranks(2)
def test_most_of_the_backward_is_still_to_come_when_the_first_bucket_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layers_before_the_first_bucket(monkeypatch) == 1


@ranks(2)
def test_the_order_of_registration_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above cannot pass by accident: the first bucket would hold what is ready last."""
    monkeypatch.setattr(Readiness, "sort", lambda self, named: list(named))
    assert layers_before_the_first_bucket(monkeypatch) == LAYERS


@ranks(2, 3)
def test_results_have_the_same_bits() -> None:
    results = []
    for bucket_mb in (BUCKET, 100.0):  # the second is one bucket and the order does not matter
        net = Net()
        optimizer = distributed(net, bucket_mb=bucket_mb)
        for number in range(4):
            step(net, optimizer, number)
        results.append(list(net.parameters()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_gloo_too() -> None:
    """Where additions have another order in other buckets, two trainings still have the same bits."""

    def body() -> list[tuple[torch.Tensor, ...]]:
        results = []
        for _ in range(2):
            net = Net()
            optimizer = distributed(net)
            for number in range(3):
                step(net, optimizer, number)
            first = optimizer._hora.reducer._buckets[0]
            assert {id(each) for each in first.parameters} == {
                id(each) for each in net.layers[4].parameters()
            }
            results.append(tuple(each.detach() for each in net.parameters()))
        return results

    for first, second in run_ranks(3, body, engine="gloo"):
        for ours, theirs in zip(first, second, strict=True):
            assert torch.equal(ours, theirs)


@ranks(3)
def test_ranks_that_differ_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net((0, 1, 2, 3, 4, 5, 6, 7) if hora.rank() else USE)
    happened = watched(net, monkeypatch)
    optimizer = distributed(net)
    for number in range(3):
        step(net, optimizer, number)
    found = buckets_of(happened)
    # Sums of places, from 0 for what is ready first: layer 7 has 4 + 0 + 0, 4 and 5 have 6,
    # 6 has 8, 2 has 11, 1 and 3 have 15, and 0 has 19.
    assert found[:5] == [(7,), (4, 5), (2, 6), (1, 3), (0,)]
    assert len(set(map(str, hora.allgather_object(found)))) == 1
    for parameter in net.parameters():
        assert torch.equal(parameter, hora.broadcast(parameter.detach(), 0))


@ranks(2)
def test_what_is_not_used_keeps_no_other_bucket_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(USE[:5])  # not 5, 2, 4
    happened = watched(net, monkeypatch)
    optimizer = distributed(net)
    for number in range(2):
        del happened[:]
        step(net, optimizer, number)
    assert happened == [1, (1,), 7, 0, (0, 7), 6, 3, (3, 6), (4, 5), (2,)]
    assert net.layers[5].weight.grad is None


@ranks(2)
def test_steps_without_any_gradient_leave_the_order_open(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    happened = watched(net, monkeypatch)
    optimizer = distributed(net)
    optimizer.step()  # some scripts make the optimizer's state so
    assert buckets_of(happened)[0] == (7,)
    for number in range(2):
        del happened[:]
        step(net, optimizer, number)
        assert buckets_of(happened)[0] == (4,)


@ranks(2)
def test_a_first_backward_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("out of range")

    net = Net()
    happened = watched(net, monkeypatch)
    optimizer = distributed(net)
    handle = net.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="out of range"):
        net.loss(0).backward()
    handle.remove()
    for number in range(2):
        del happened[:]
        step(net, optimizer, number)
    assert happened[:2] == [4, (4,)]


@ranks(2)
def test_passes_thawed_layers_and_added_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    happened = watched(net, monkeypatch)
    net.layers[2].requires_grad_(False)
    optimizer = distributed(net, backward_passes_per_step=2)
    optimizer.add_param_group({"params": list(net.layers[2].parameters())})
    reference = Net()
    reference.layers[2].requires_grad_(False)
    plain = torch.optim.SGD([*reference.parameters()], lr=0.5, momentum=0.9)
    for number in range(4):
        if number == 2:
            net.layers[2].requires_grad_(True)
            reference.layers[2].requires_grad_(True)
        del happened[:]
        optimizer.zero_grad()
        plain.zero_grad()
        for place in range(2):
            net.loss(2 * number + place).backward()
        optimizer.step()
        for place in range(2):
            for rank in range(2):
                (reference.loss(2 * number + place, rank) / 4).backward()
        plain.step()
        assert buckets_of(happened)[0] == (4,)
        assert (2 in buckets_of(happened)[-1]) == (number >= 2)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@ranks(3)
def test_a_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = hora.add_process_set([0, 2])
    net = Net()
    happened = watched(net, monkeypatch)
    optimizer = distributed(net, process_set=chosen)
    for number in range(2):
        step(net, optimizer, number)
    assert buckets_of(happened)[:1] == ([(4,)] if chosen.included() else [])
    if chosen.included():
        for parameter in net.parameters():
            assert torch.equal(parameter, hora.broadcast(parameter.detach(), 0, process_set=chosen))


@pytest.mark.parametrize("away", [0, 2])
@ranks(3)
def test_a_rank_that_joins_before_the_order_is_known(monkeypatch: pytest.MonkeyPatch, away: int) -> None:
    net = Net()
    happened = watched(net, monkeypatch)
    optimizer = distributed(net)
    for number in range(0 if hora.rank() == away else 3):
        step(net, optimizer, number)
    hora.join()
    del happened[:]
    step(net, optimizer, 9)
    assert happened[:2] == [4, (4,)]
    for parameter in net.parameters():
        assert torch.equal(parameter, hora.broadcast(parameter.detach(), 0))


@ranks(2)
def test_a_sharded_optimizer_sends_complete_buffers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers hold what was registered side by side, and stay; the order of sending follows backward."""
    net = Net((6, 7, 0, 1, 4, 5, 2, 3))
    happened = watched(net, monkeypatch)
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", BUCKET)
    optimizer = distributed(net, shard="optimizer")
    for number in range(2):
        del happened[:]
        step(net, optimizer, number)
    assert happened == [3, 2, (2, 3), 5, 4, (4, 5), 1, 0, (0, 1), 7, 6, (6, 7)]

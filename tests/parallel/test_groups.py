"""Groups of parameters: each travels in one message, whatever the sizes; the values do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import GradientError
from hora.torch import _buckets
from hora.torch._groups import Groups, even_parts
from hora.torch._reducer import Reducer


def model() -> torch.nn.Sequential:
    """Nine parameters, one of them frozen, of two dtypes."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 5),
        torch.nn.Tanh(),
        torch.nn.Linear(5, 5),
        torch.nn.Linear(5, 5),
        torch.nn.Linear(5, 1),
    ).double()
    net.scale = torch.nn.Parameter(torch.ones(()), requires_grad=True)
    net[2].bias.requires_grad_(False)
    return net


def loss_of(net: Any, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    loss: torch.Tensor = (net(x) * net.scale).square().mean()
    return loss


def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of the parameters in each message from here on."""
    sent: list[tuple[str, ...]] = []
    launch = Reducer._launch

    def counted(self: Reducer, bucket: _buckets.Bucket, **rest: Any) -> None:
        sent.append(tuple(sorted(bucket.names)))
        launch(self, bucket, **rest)

    monkeypatch.setattr(Reducer, "_launch", counted)
    return sent


def train(make: Callable[[Any], Any], parts: list[int], steps: int = 3) -> tuple[Any, list[torch.Tensor]]:
    net = model()
    optimizer = make(net)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(net, 10 * step + part) for part in parts]).mean().backward()
        optimizer.step()
    return net, [parameter.detach() for parameter in net.parameters()]


def sgd(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


ALONE = ["4.weight", "4.bias", "3.weight", "3.bias", "2.weight", "0.weight", "0.bias"]
"""The trainable float64 parameters."""

CASES: list[tuple[dict[str, Callable[[Any], Any]], list[tuple[str, ...]]]] = [
    (
        {"groups": lambda net: [[net[0].weight, net[4].bias], list(net[2].parameters())]},
        [*((name,) for name in ALONE if name not in ("4.bias", "0.weight")), ("0.weight", "4.bias")],
    ),
    ({"groups": lambda net: 0}, [(name,) for name in ALONE]),
    ({"num_groups": lambda net: 99}, [(name,) for name in ALONE]),
    ({"groups": lambda net: 1}, [tuple(sorted(ALONE))]),
    (
        {"num_groups": lambda net: 2},
        # The eighth trainable parameter, in float32, comes first of all and travels alone.
        [("0.bias", "0.weight", "2.weight"), ("3.bias", "3.weight", "4.bias", "4.weight")],
    ),
]


@ranks(1, 2, 3)
def test_a_group_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", 0)  # without groups each parameter would travel alone
    size, rank = hora.size(), hora.rank()
    _, expected = train(sgd, list(range(size)))
    sent = messages(monkeypatch)
    for options, wanted in CASES:
        del sent[:]

        def make(net: Any, options: dict[str, Any] = options) -> Any:
            chosen = {key: value(net) for key, value in options.items()}
            return hora.DistributedOptimizer(sgd(net), net.named_parameters(), bucket_mb=0, **chosen)

        _, result = train(make, [rank])
        for own, other in zip(result, expected, strict=True):
            assert torch.allclose(own, other, rtol=1e-6)  # one of them is in float32
        step = sent[: len(sent) // 3]
        assert sent == 3 * step
        assert sorted(step) == (sorted([*wanted, ("scale",)]) if size > 1 else [])


@ranks(2)
def test_groups_may_hold_several_dtypes_and_grow_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = messages(monkeypatch)
    net = model()
    added = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = hora.DistributedOptimizer(sgd(net), net, groups=[list(net.parameters())])
    loss_of(net, hora.rank()).backward()
    assert sorted(map(len, sent)) == [1, 7]  # float32 cannot travel with float64
    del sent[:]
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [added]})
    (loss_of(net, hora.rank()) + added.sum() * hora.rank()).backward()
    assert sorted(map(len, sent)) == [1, 1, 7]
    assert added.grad is not None
    assert added.grad.tolist() == [0.5, 0.5]


@ranks(2)
def test_groups_that_cannot_be_are_refused() -> None:
    net = model()
    first, second = net[0].weight, net[0].bias
    for options, match in (
        ({"groups": [[first, second], [first]]}, "is in group 0 and again in group 1"),
        ({"groups": [[first, first]]}, "again in group 0"),
        ({"groups": [[first], [torch.zeros(7)]]}, r"group 1 holds a tensor of shape \(7,\) that is not"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": True}, "groups=True"),
        ({"groups": 1.5}, "neither a number"),
        ({"groups": "two"}, "neither a number"),
        ({"groups": [first, second]}, "nor a list of lists"),
        ({"groups": [["0.weight"]]}, "nor a list of lists"),
        ({"num_groups": -1}, "num_groups=-1"),
        ({"num_groups": None}, "num_groups=None"),
    ):
        with pytest.raises(GradientError, match=match):
            hora.DistributedOptimizer(sgd(net), net, **options)  # type: ignore[arg-type]
    with pytest.raises(GradientError, match=r"0.weight .* of group 0 on rank 0 and 0.weight .*\) on rank 1"):
        hora.DistributedOptimizer(sgd(net), net, groups=[[first]] if hora.rank() == 0 else [[second]])


@given(st.integers(0, 40), st.integers(0, 50))
def test_even_parts(count: int, parts: int) -> None:
    items = list(range(count))
    found = even_parts(items, parts)
    assert [item for part in found for item in part] == (items if parts else [])
    assert len(found) == min(count, parts)
    if found:
        sizes = [len(part) for part in found]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_number_of_groups_is_the_older_word() -> None:
    named = [(str(index), torch.zeros(1)) for index in range(4)]
    assert Groups(2).numbers(named) == Groups(0, 2).numbers(named)
    assert Groups(2, 4).numbers(named) == Groups(4).numbers(named)  # groups= wins, as in Horovod

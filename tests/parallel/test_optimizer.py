"""DistributedOptimizer on N ranks is the plain optimizer on the union of their batches."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.ranks import RankFailure, ranks, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import hora.torch as hora
from hora.core.errors import GradientError
from hora.torch import _buckets
from hora.torch._reducer import Reducer

BATCH = 12


@pytest.fixture(params=["copied", "viewed"])
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are copied in and out of buckets, and gradients that are views of them."""
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", 1e-4)  # these small nets shall have several buckets
    if request.param == "viewed":
        monkeypatch.setattr(_buckets, "SMALL", 0)


each_kind_of_gradient = pytest.mark.usefixtures("each_kind")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}


class Net(nn.Module):
    """A small network in float64 with a shared layer, a frozen layer and layers that are used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, x: torch.Tensor, *, sometimes: bool = False) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.inner(x))))
        x = self.frozen(torch.tanh(self.shared(x)))
        if sometimes:
            x = x + self.sometimes(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, dtype=torch.float64, generator=generator)
    return x, x[:, :2] ** 2


def mine(tensor: torch.Tensor) -> torch.Tensor:
    part = BATCH // hora.size()
    return tensor[hora.rank() * part : (hora.rank() + 1) * part]


def loss_of(model: nn.Module, step: int, *, union: bool, **options: bool) -> torch.Tensor:
    x, y = batch(step)
    if not union:
        x, y = mine(x), mine(y)
    return ((model(x, **options) - y) ** 2).mean()


def same(model: nn.Module, reference: nn.Module, *, tolerance: float = 1e-12) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), name
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.allclose(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance), name


def distributed(
    model: nn.Module, make: MakeOptimizer = OPTIMIZERS["sgd"], **options: Any
) -> torch.optim.Optimizer:
    return hora.DistributedOptimizer(make(model.parameters()), model, **options)


@each_kind_of_gradient
@ranks(1, 2, 3, 4)
def test_every_optimizer_equals_the_union_batch() -> None:
    for name, make in OPTIMIZERS.items():
        model, reference = net(), net()
        ours, plain = distributed(model, make, bucket_mb=1e-4), make(reference.parameters())
        for step in range(5):
            ours.zero_grad()
            loss_of(model, step, union=False).backward()
            ours.step()
            plain.zero_grad()
            loss_of(reference, step, union=True).backward()
            plain.step()
        assert model.never.weight.grad is None, name
        same(model, reference)


@each_kind_of_gradient
@ranks(1, 2, 3)
def test_gradients_are_global_when_backward_returns() -> None:
    model, reference = net(), net()
    ours, plain = distributed(model), OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        ours.zero_grad(set_to_none=step % 2 == 0)
        plain.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step, union=False).backward()
        loss_of(reference, step, union=True).backward()
        same(model, reference)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), rtol=1e-12)
        ours.step()
        plain.step()
        same(model, reference)


@each_kind_of_gradient
@ranks(1, 2, 3)
def test_accumulated_passes_are_right_and_retained_graphs_too() -> None:
    model, reference = net(), net()
    ours, plain = distributed(model), OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        for part in range(3):
            (loss_of(model, 3 * step + part, union=False) / 3).backward()
            (loss_of(reference, 3 * step + part, union=True) / 3).backward()
            same(model, reference)
        for each, union in ((model, False), (reference, True)):
            loss = loss_of(each, step, union=union)
            loss.backward(retain_graph=True)
            loss.backward()
        same(model, reference)
        ours.step()
        plain.step()
        ours.zero_grad()
        plain.zero_grad()
    same(model, reference)


@each_kind_of_gradient
@ranks(2, 3)
def test_a_layer_that_only_some_ranks_use_counts_as_zero_elsewhere() -> None:
    model, reference = net(), net()
    ours, plain = distributed(model, bucket_mb=1e-4), OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(model, step, union=False, sometimes=hora.rank() == step % hora.size()).backward()
        x, y = batch(step)
        part = BATCH // hora.size()
        for rank in range(hora.size()):
            piece = slice(rank * part, (rank + 1) * part)
            output = reference(x[piece], sometimes=rank == step % hora.size())
            (((output - y[piece]) ** 2).mean() / hora.size()).backward()
        ours.step()
        plain.step()
        same(model, reference)


@each_kind_of_gradient
@ranks(2, 3)
def test_a_rank_without_any_backward_holds_nobody_up() -> None:
    model, reference = net(), net()
    ours, plain = distributed(model), OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        ours.zero_grad()
        plain.zero_grad()
        if hora.rank() != step % hora.size():
            loss_of(model, step, union=False).backward()
        x, y = batch(step)
        part = BATCH // hora.size()
        for rank in range(hora.size()):
            if rank != step % hora.size():
                piece = slice(rank * part, (rank + 1) * part)
                (((reference(x[piece]) - y[piece]) ** 2).mean() / hora.size()).backward()
        ours.step()
        plain.step()
        same(model, reference)


@each_kind_of_gradient
@ranks(1, 2)
def test_freezing_later_and_groups_added_later() -> None:
    model, reference = net(), net()
    ours = hora.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9))
    plain = torch.optim.SGD(reference.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        if step == 2:
            ours.add_param_group({"params": list(model.inner.parameters()), "lr": 0.01})
            plain.add_param_group({"params": list(reference.inner.parameters()), "lr": 0.01})
            ours.add_param_group({"params": list(model.frozen.parameters())})
            plain.add_param_group({"params": list(reference.frozen.parameters())})
        for each in (model, reference):
            each.inner.requires_grad_(step != 4)
            each.frozen.requires_grad_(step >= 5)
        for each, optimizer, union in ((model, ours, False), (reference, plain, True)):
            optimizer.zero_grad()
            loss_of(each, step, union=union).backward()
            optimizer.step()
    same(model.head, reference.head)
    same(model.inner, reference.inner)
    same(model.frozen, reference.frozen)


@each_kind_of_gradient
@ranks(1, 2)
def test_mixed_dtypes_and_memory_formats() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(
        [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(16, 2).bfloat16()]
    )
    model.append(nn.Linear(2, 2).double())
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("complex", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    x = torch.full((1, 3, 4, 4), hora.rank() + 1.0).to(memory_format=torch.channels_last)
    inner = model[1](model[0](x).flatten(1).bfloat16()).double()
    loss = model[2](inner).sum() + (model.complex * (hora.rank() + 1j)).real.sum() + model.empty.sum()
    loss.backward()
    average = (hora.size() + 1) / 2
    assert torch.allclose(model[2].bias.grad, torch.ones(2).double())
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    assert model[1].weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.complex.grad, torch.full((3,), average - 1 - 1j, dtype=torch.complex128))
    for parameter in model.parameters():
        assert torch.equal(hora.broadcast(parameter.grad, 0), parameter.grad)
    optimizer.step()


@ranks(1, 2)
def test_two_optimizers_of_a_gan() -> None:
    def train(*, union: bool) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        generator, critic = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
        first, second = OPTIMIZERS["adam"](generator.parameters()), OPTIMIZERS["sgd"](critic.parameters())
        if not union:
            first = hora.DistributedOptimizer(first, generator)
            second = hora.DistributedOptimizer(second, critic)
        for step in range(4):
            x = batch(step)[0] if union else mine(batch(step)[0])
            first.zero_grad()
            critic(generator(x)).square().mean().backward()  # gives the critic gradients too
            first.step()
            second.zero_grad()
            (critic(x) - critic(generator(x).detach())).mean().backward()
            second.step()
        return generator, critic

    for ours, theirs in zip(train(union=False), train(union=True), strict=True):
        same(ours, theirs)


@ranks(1, 2, 3)
def test_closures_average_inside_and_lbfgs_takes_the_same_path() -> None:
    for make in (
        OPTIMIZERS["sgd"],
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=6, line_search_fn="strong_wolfe"),
    ):
        model, reference = net(), net()
        ours, plain = distributed(model, make), make(reference.parameters())
        for step in range(3):
            for each, optimizer, union in ((model, ours, False), (reference, plain, True)):

                def closure(
                    each: nn.Module = each, optimizer: Any = optimizer, union: bool = union
                ) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(each, step, union=union)  # noqa: B023 - called at once
                    loss.backward()
                    return loss

                if step == 1:
                    optimizer.step(closure=closure)
                else:
                    optimizer.step(closure)
        same(model, reference, tolerance=1e-10)


@ranks(1, 2)
def test_schedulers_made_before_or_after_wrapping() -> None:
    for before in (True, False):
        model, reference = net(), net()
        plain = OPTIMIZERS["sgd"](reference.parameters())
        inner = OPTIMIZERS["sgd"](model.parameters())
        if before:
            schedule = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
        ours = hora.DistributedOptimizer(inner, model)
        assert ours is inner
        assert isinstance(ours, torch.optim.SGD)
        if not before:
            schedule = torch.optim.lr_scheduler.StepLR(ours, 2, gamma=0.5)
        other = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
        for step in range(5):
            for each, optimizer, union in ((model, ours, False), (reference, plain, True)):
                optimizer.zero_grad()
                loss_of(each, step, union=union).backward()
                optimizer.step()
            schedule.step()
            other.step()
        assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.05 / 4
        same(model, reference)


@each_kind_of_gradient
@ranks(2)
def test_a_backward_that_fails_leaves_no_trace() -> None:
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    for everywhere in (True, False):
        model, reference = net(), net()
        ours, plain = distributed(model, bucket_mb=1e-4), OPTIMIZERS["sgd"](reference.parameters())
        for step in range(4):
            ours.zero_grad()
            if step == 2 and everywhere:
                hidden = Explode.apply(torch.tanh(model.inner(mine(batch(step)[0]))))
                with pytest.raises(ArithmeticError, match="on purpose"):
                    model.head(model.shared(hidden)).mean().backward()
                for parameter in model.parameters():
                    parameter.grad = None
            loss_of(model, step, union=False).backward()
            ours.step()
            plain.zero_grad()
            loss_of(reference, step, union=True).backward()
            plain.step()
        same(model, reference)


@each_kind_of_gradient
@ranks(1, 2)
def test_reentrant_checkpoints() -> None:
    for reentrant in (True, False):
        model, reference = net(), net()
        ours, plain = distributed(model, bucket_mb=1e-4), OPTIMIZERS["sgd"](reference.parameters())
        for step in range(3):
            for each, optimizer, union in ((model, ours, False), (reference, plain, True)):
                x, y = batch(step) if union else map(mine, batch(step))
                optimizer.zero_grad()
                hidden = each.shared(each.inner(x))
                for _ in range(2):
                    hidden = checkpoint(
                        lambda h, each=each: torch.tanh(each.shared(h)), hidden, use_reentrant=reentrant
                    )
                ((each.head(each.shared(hidden)) - y) ** 2).mean().backward()
                optimizer.step()
            same(model, reference)


def order_of_gradients_and_messages() -> list[int | str]:
    """What happens in the second backward of four layers of 1 MB: each gradient's layer, and each message."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    happened: list[int | str] = []
    for number, layer in enumerate(model):
        for parameter in layer.parameters():
            # Before the optimizer's own hooks, which send messages off.
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: happened.append(number))
    optimizer = distributed(model, bucket_mb=0.5)
    model(torch.ones(2, 512)).sum().backward()  # which finds out the order
    optimizer.zero_grad()
    happened.clear()
    context = hora.context()
    group = context.group

    def allreduce(*arguments: Any) -> Any:
        happened.append("message")
        return group.allreduce(*arguments)

    context.group = Mock(wraps=group, allreduce=allreduce)
    model(torch.ones(2, 512)).sum().backward()
    context.group = group
    optimizer.zero_grad()
    return happened


@ranks(2)
def test_each_bucket_leaves_before_backward_goes_on_to_the_next_layer() -> None:
    happened = order_of_gradients_and_messages()
    assert happened == [3, 3, "message", 2, 2, "message", 1, 1, "message", 0, 0, "message"]


@ranks(2)
def test_averaging_after_backward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above cannot pass by accident: this is what it sees when no bucket leaves early."""
    monkeypatch.setattr(Reducer, "advance", lambda self: None)
    assert order_of_gradients_and_messages() == [3, 3, 2, 2, 1, 1, 0, 0, *["message"] * 4]


@each_kind_of_gradient
@ranks(1, 2)
def test_gradients_that_somebody_keeps_are_not_overwritten() -> None:
    model = net()
    optimizer = distributed(model)
    loss_of(model, 0, union=False).backward()
    kept = model.head.weight.grad
    part = model.inner.weight.grad[1]
    before, part_before = kept.clone(), part.clone()
    optimizer.zero_grad()
    loss_of(model, 1, union=False).backward()
    assert torch.equal(kept, before)
    assert torch.equal(part, part_before)
    assert not torch.equal(model.head.weight.grad, before)


@each_kind_of_gradient
@ranks(1, 2)
def test_gradients_set_by_hand_are_averaged_at_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    weight.grad = torch.full((2,), float(hora.rank() + 1), dtype=torch.float64)
    optimizer.synchronize()
    optimizer.synchronize()
    assert weight.grad.tolist() == [(hora.size() + 1) / 2] * 2
    optimizer.step()
    assert weight.tolist() == [-(hora.size() + 1) / 2] * 2


@each_kind_of_gradient
@ranks(1, 2)
def test_grad_scaler_skips_the_step_everywhere_when_one_rank_overflows() -> None:
    model = nn.Linear(2, 1)
    hora.broadcast_parameters(model)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    scale = float("inf") if hora.rank() == hora.size() - 1 else 1.0
    scaler.scale(model(torch.ones(1, 2)).sum() * scale).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert torch.allclose(model.weight, before - 0.1)


@ranks(1, 2)
def test_copies_and_pickles_are_plain_and_state_dicts_unchanged() -> None:
    model = net()
    optimizer = distributed(model, OPTIMIZERS["adamw"])
    loss_of(model, 0, union=False).backward()
    optimizer.step()
    plain = torch.optim.AdamW(net().parameters(), lr=0.01, weight_decay=0.1)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.AdamW
        assert copied.state_dict()["state"][0]["step"] == 1
    twin = copy.deepcopy(model)
    loss_of(twin, 0, union=False).backward()
    loss_of(model, 0, union=False).backward()
    optimizer.step()


@ranks(1, 2)
def test_an_optimizer_that_is_gone_leaves_its_parameters_alone() -> None:
    model = net()
    optimizer = distributed(model)
    with pytest.raises(GradientError, match="another DistributedOptimizer"):
        distributed(model)
    with pytest.raises(GradientError, match="distributed already"):
        hora.DistributedOptimizer(optimizer, model)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    loss_of(model, 0, union=False).backward()
    assert not model.head.weight._post_accumulate_grad_hooks
    distributed(model)


@ranks(1, 2)
def test_named_parameters_cover_the_optimizer() -> None:
    model, other = net(), nn.Linear(2, 2)

    def optimizer() -> torch.optim.Optimizer:
        return OPTIMIZERS["sgd"](model.parameters())

    pairs = list(model.named_parameters())
    for given, match in (
        (pairs[1:], "lacks 1 of the optimizer's parameters; the first is parameter 0 of group 0, of shape"),
        ([*pairs, ("extra", other.weight)], "'extra' is in named_parameters but not in the optimizer"),
        ([*pairs, pairs[0]], "'inner.weight' twice"),
        ([*pairs, ("again", pairs[0][1])], "'again' twice: it is the same tensor as 'inner.weight'"),
        (list(model.parameters()), "holds Parameter, not pairs"),
    ):
        with pytest.raises(GradientError, match=match):
            hora.DistributedOptimizer(optimizer(), given)
    with pytest.raises(GradientError, match="'bias' is in named_parameters but not in the optimizer"):
        hora.DistributedOptimizer(torch.optim.SGD([other.weight], lr=1.0), other)
    with pytest.raises(GradientError, match="takes an optimizer, not Net"):
        hora.DistributedOptimizer(model, model)
    other.bias.requires_grad_(False)
    hora.DistributedOptimizer(torch.optim.SGD([other.weight], lr=1.0), other)


@ranks(3)
def test_ranks_with_different_parameters_are_told_so() -> None:
    width = 4 if hora.rank() == 2 else 3
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
    match = r"number 2 is 1.weight \(float32 \(3, 2\)\) on rank 0 and 1.weight \(float32 \(4, 2\)\) on rank 2"
    with pytest.raises(GradientError, match=match):
        hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    with pytest.raises(GradientError, match="rank 0 has 2 of them and rank 1 has 1"):
        parameters = list(model[0].parameters())[: 1 if hora.rank() == 1 else 2]
        hora.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    hora.barrier()


@each_kind_of_gradient
@ranks(2)
def test_gradients_that_cannot_be_averaged() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table)
    with pytest.raises(GradientError, match=r"gradient of weight is sparse;.*sparse=False"):
        table(torch.tensor([1])).sum().backward()
    model = nn.Linear(2, 2)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    with pytest.raises(GradientError, match="differentiable"):
        (model(torch.ones(1, 2)) ** 2).sum().backward(create_graph=True)
    optimizer.zero_grad()


@ranks(2, 3)
def test_different_numbers_of_passes_are_an_error_on_every_rank() -> None:
    model = net()
    optimizer = distributed(model)
    with pytest.raises(GradientError, match="different numbers of backward passes"):
        for step in range(2):
            optimizer.zero_grad()
            for _ in range(2 if hora.rank() == 1 and step == 0 else 1):
                loss_of(model, step, union=False).backward()
            optimizer.step()


def test_the_death_of_a_rank_in_backward_is_an_error_on_the_others() -> None:
    def body() -> None:
        model = net()
        distributed(model)
        if hora.rank() == 1:
            raise ArithmeticError("on purpose")
        loss_of(model, 0, union=False).backward()

    with pytest.raises(RankFailure, match="on purpose") as failure:
        run_ranks(2, body, limit=20)
    assert "did not end in time" not in str(failure.value)

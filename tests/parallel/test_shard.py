"""shard="optimizer" on N ranks is the plain optimizer on the union of their batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parallel.shard_net import OPTIMIZERS, Net, loss_of, net, same, same_state, sharded
from tests.ranks import ranks, run_ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import GradientError
from hora.torch import _buckets
from hora.torch.shard import _moves
from hora.torch.shard._gradient import GradientShare, whole


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """These small nets shall have several buckets, and gradients that are copied one at a time."""
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", 1e-4)
    monkeypatch.setattr(_buckets, "SMALL", 8)


SMALL_BUCKETS = 5e-4
"""MB; a few buckets for these nets."""


def both(make: Any = OPTIMIZERS["adamw"], **options: Any) -> tuple[Net, Any, Net, Any]:
    """A net with a sharded optimizer, and one with a plain optimizer."""
    model, reference = net(), net()
    options = {"bucket_mb": SMALL_BUCKETS} | options
    return model, sharded(model, make, **options), reference, make(reference.parameters())


def backward(
    model: nn.Module, reference: nn.Module, step: int, *, factor: float = 1.0, **options: bool
) -> None:
    (factor * loss_of(model, step, union=False, **options)).backward()
    (factor * loss_of(reference, step, union=True, **options)).backward()


@pytest.mark.parametrize("which", range(3))
@ranks(1, 2, 3, 4)
def test_every_elementwise_optimizer_equals_the_plain_one(which: int) -> None:
    for name in list(OPTIMIZERS)[which::3]:
        model, ours, reference, plain = both(OPTIMIZERS[name])
        for step in range(4):
            ours.zero_grad()
            plain.zero_grad()
            # torch's fused SGD itself fails where a parameter gets its first gradient later than others.
            backward(model, reference, step, sometimes=step % 2 == 1 and name != "sgd-fused")
            ours.step()
            plain.step()
        assert model.never.weight.grad is None, name
        same(model, reference)
        if which == 0:
            same_state(ours.state_dict(), plain.state_dict())


@ranks(1, 2, 3)
def test_norms_and_clipping_are_those_of_the_whole() -> None:
    model, ours, reference, plain = both()
    for step, order in enumerate([2.0, 2.0, 1.0, float("inf"), 3.0]):
        ours.zero_grad(set_to_none=step % 2 == 0)
        plain.zero_grad(set_to_none=step % 2 == 0)
        backward(model, reference, step)
        if step == 4:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            if one.grad is not None and other.grad is not None:
                assert torch.allclose(one.grad.norm(), other.grad.norm(), rtol=1e-12)
        norm, theirs = (
            nn.utils.clip_grad_norm_([p for p in each.parameters() if p.numel()], 0.1, norm_type=order)
            for each in (model, reference)  # an empty tensor has no largest element
        )
        assert torch.allclose(norm, theirs, rtol=1e-12)
        assert bool(theirs > 0.1) or step == 4  # or nothing was clipped
        assert torch.equal(norm, hora.broadcast(norm, 0))
        ours.step()
        plain.step()
        same(model, reference, gradients=True)


@ranks(2)
def test_a_norm_of_all_gradients_costs_one_message() -> None:
    model, _ours, reference, _ = both()
    backward(model, reference, 0)
    started: list[int] = []
    original = torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        started.append(tensor.numel())
        return original(tensor, **options)

    torch.distributed.all_reduce = counting
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    finally:
        torch.distributed.all_reduce = original
    assert started == [len(list(model.parameters()))]


@ranks(1, 2, 3)
def test_accumulated_passes_are_right_and_retained_graphs_too() -> None:
    model, ours, reference, plain = both()
    for step in range(3):
        for part in range(3):
            backward(model, reference, 3 * step + part, factor=1 / 3)
            same(model, reference, gradients=True)
        for each, union in ((model, False), (reference, True)):
            loss = loss_of(each, step, union=union, sometimes=True)
            loss.backward(retain_graph=True)
            loss.backward()
        same(model, reference, gradients=True)
        ours.step()
        plain.step()
        ours.zero_grad(set_to_none=step == 0)
        plain.zero_grad(set_to_none=step == 0)
    same(model, reference, gradients=True)


@ranks(1, 2, 3)
def test_several_passes_per_step_are_averaged_in_the_last() -> None:
    model, ours, reference, plain = both(backward_passes_per_step=3)
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        passes = 3 if step < 2 else 2
        for part in range(passes):
            backward(model, reference, 3 * step + part)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= passes
        ours.step()
        plain.step()
        same(model, reference)


@ranks(2, 3)
def test_a_layer_that_only_some_ranks_use_counts_as_zero_elsewhere() -> None:
    model, ours, reference, plain = both()
    for step in range(4):
        ours.zero_grad()
        plain.zero_grad()
        if hora.rank() != (step + 1) % hora.size():  # one rank has no backward at all
            loss_of(model, step, union=False, sometimes=hora.rank() == step % hora.size()).backward()
        for rank in range(hora.size()):
            if rank != (step + 1) % hora.size():
                loss = loss_of(reference, step, rank=rank, sometimes=rank == step % hora.size())
                (loss / hora.size()).backward()
        ours.step()
        plain.step()
        same(model, reference)


@ranks(1, 2, 3)
def test_groups_with_their_own_rates_and_schedules() -> None:
    def make(model: Net) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1, "lr": 0.03},
            {"params": others, "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    model, reference = net(), net()
    ours, plain = make(model), make(reference)
    ours = hora.DistributedOptimizer(ours, model, shard="optimizer", bucket_mb=SMALL_BUCKETS)
    schedules = [
        torch.optim.lr_scheduler.SequentialLR(
            each,
            [
                torch.optim.lr_scheduler.LinearLR(each, start_factor=0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=4),
            ],
            milestones=[2],
        )
        for each in (ours, plain)
    ]
    for step in range(6):
        if step == 3:
            for each in (ours, plain):
                each.param_groups[1]["weight_decay"] = 0.2
        ours.zero_grad()
        plain.zero_grad()
        backward(model, reference, step)
        ours.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in plain.param_groups]
        same(model, reference)


@ranks(1, 2, 3)
def test_parameters_are_frozen_thawed_and_added() -> None:
    model, ours, reference, plain = both(lambda p: torch.optim.AdamW(list(p)[:-2], lr=0.01), named=False)
    for step in range(6):
        for each, optimizer in ((model, ours), (reference, plain)):
            optimizer.zero_grad()
            each.frozen.requires_grad_(step >= 2)
            each.inner.requires_grad_(step not in (1, 2))
            if step == 4:
                optimizer.add_param_group({"params": list(each.head.parameters()), "lr": 0.1})
        backward(model, reference, step, sometimes=step % 3 == 0)
        ours.step()
        plain.step()
        for each in (model, reference):
            each.head.zero_grad()
        same(model, reference)
    same_state(ours.state_dict(), plain.state_dict())


@ranks(1, 2, 3)
def test_gradients_set_or_taken_away_by_hand_count() -> None:
    model, ours, reference, plain = both()
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        if step == 1:  # no backward: step() averages
            for index, (one, other) in enumerate(
                zip(model.parameters(), reference.parameters(), strict=True)
            ):
                if one.requires_grad:
                    one.grad = torch.full_like(one, float(hora.rank() + index))
                    other.grad = torch.full_like(other, (hora.size() - 1) / 2 + index)
        else:
            backward(model, reference, step)
            for each in (model, reference):
                each.inner.weight.grad = torch.ones_like(each.inner.weight) * step
                each.inner.bias.grad = None
                each.head.bias.grad.mul_(3.0).add_(each.head.bias.detach(), alpha=0.1)
        ours.step()
        plain.step()
        same(model, reference)


@ranks(1, 2, 3)
def test_a_closure_is_averaged_and_its_loss_too() -> None:
    model, ours, reference, plain = both()
    for step in range(3):

        def closure(each: Any, optimizer: Any, union: bool, step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(each, step, union=union, sometimes=step == 1)
            loss.backward()
            return loss

        loss = ours.step(lambda: closure(model, ours, False))
        assert torch.allclose(loss, plain.step(lambda: closure(reference, plain, True)), rtol=1e-12)
        same(model, reference)


@pytest.mark.parametrize("fused", [False, True])
@ranks(1, 2)
def test_a_scaler_skips_a_step_where_any_rank_overflows(fused: bool) -> None:
    model, ours, reference, plain = both(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]
    for step in range(6):
        for each, optimizer, scaler, union in (
            (model, ours, scalers[0], False),
            (reference, plain, scalers[1], True),
        ):
            optimizer.zero_grad()
            loss = loss_of(each, step, union=union)
            if step in (1, 2) and (union or hora.rank() == step - 1 or hora.size() == 1):
                loss = loss + each.inner.weight[0, 0] * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        same(model, reference)
    assert scalers[0].get_scale() != 8.0


@ranks(1, 2, 3)
def test_mixed_dtypes_and_memory_formats() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Linear(5 * 4, 7),
            nn.Linear(7, 3).to(torch.bfloat16),
            nn.Linear(3, 1),
        ).float()
        model[3].to(torch.bfloat16)
        return model

    def loss_of_rank(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        x = model[2](model[1](model[0](x))).to(torch.bfloat16)
        return model[4](model[3](x).float()).square().mean()

    model, reference = build(), build()
    ours = sharded(model, OPTIMIZERS["momentum"])
    plain = hora.DistributedOptimizer(OPTIMIZERS["momentum"](reference.parameters()), reference)
    for step in range(4):
        ours.zero_grad()
        plain.zero_grad()
        loss_of_rank(model, step, hora.rank()).backward()
        loss_of_rank(reference, step, hora.rank()).backward()
        ours.step()
        plain.step()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        bound = 0.02 if one.dtype is torch.bfloat16 else 1e-4  # bfloat16's rounding in another order
        assert one.stride() == other.stride(), name
        assert torch.allclose(one.float(), other.float(), rtol=bound, atol=bound), name
        assert torch.equal(one, hora.broadcast(one, 0)), name
    same_state(ours.state_dict(), plain.state_dict(), tolerance=0.02)


@ranks(2)
def test_two_ranks_have_the_bits_of_an_optimizer_that_is_not_sharded() -> None:
    model, reference = net(), net()
    ours = sharded(model, OPTIMIZERS["adam"])
    plain = hora.DistributedOptimizer(OPTIMIZERS["adam"](reference.parameters()), reference)
    for step in range(4):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(model, step, union=False).backward()
        loss_of(reference, step, union=False).backward()
        ours.step()
        plain.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)


@ranks(1, 2)
def test_sum_predivision_compression_and_complex_parameters() -> None:
    for options, bound in (
        ({"op": hora.Sum}, 1e-12),
        ({"gradient_predivide_factor": 4.0}, 1e-12),
        ({"compression": hora.Compression.bf16}, 0.05),
        ({"groups": 2}, 1e-12),
    ):
        model, ours, reference, plain = both(OPTIMIZERS["momentum"], **options)
        for step in range(2):
            ours.zero_grad()
            plain.zero_grad()
            backward(model, reference, step)
            if "op" in options:
                for parameter in reference.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= hora.size()
            ours.step()
            plain.step()
        same(model, reference, tolerance=bound)
    weight, twin = (nn.Parameter(torch.ones(5, dtype=torch.complex128)) for _ in range(2))
    ours = hora.DistributedOptimizer(torch.optim.Adam([weight], lr=0.1), shard="optimizer")
    plain = torch.optim.Adam([twin], lr=0.1)
    for _ in range(3):
        for each, optimizer in ((weight, ours), (twin, plain)):
            optimizer.zero_grad()
            (each * (1 + 2j)).abs().pow(2).sum().backward()
            nn.utils.clip_grad_norm_([each], 0.5)
            optimizer.step()
    assert torch.allclose(weight, twin, rtol=1e-12)


@ranks(2)
def test_a_failed_backward_leaves_no_trace() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("half way")

    model, ours, reference, plain = both()
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        if step == 1:
            x = torch.ones(2, 6, dtype=torch.float64)
            with pytest.raises(ValueError, match="half way"):
                model.head(Failing.apply(model.inner(x))).sum().backward()
            ours.zero_grad()
        backward(model, reference, step)
        ours.step()
        plain.step()
        same(model, reference)


@ranks(2)
def test_parameters_that_got_other_memory_are_taken_in() -> None:
    model, ours, reference, plain = both()
    for step in range(3):
        for each in (model, reference):
            each.inner.weight.data = each.inner.weight.detach() * 2
        ours.zero_grad()
        plain.zero_grad()
        backward(model, reference, step)
        ours.step()
        plain.step()
        same(model, reference)


@ranks(2)
def test_autograd_notices_that_parameters_have_changed() -> None:
    model, ours, _, _ = both()
    loss = loss_of(model, 0, union=False)
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ranks(2)
def test_what_would_take_a_part_for_the_whole_is_refused() -> None:
    model, _ours, reference, _ = both()
    backward(model, reference, 0)
    gradient = model.inner.weight.grad
    assert isinstance(gradient, GradientShare)
    assert "inner.weight" in repr(gradient)
    for action in (
        lambda: gradient.abs().max(),
        lambda: gradient + 1,
        lambda: torch.cat([gradient.reshape(-1)]),
        lambda: gradient.norm(dim=0),
        lambda: torch.nn.utils.parameters_to_vector([gradient]),
    ):
        with pytest.raises(GradientError, match=r"inner\.weight.*full_tensor"):
            action()
    assert torch.allclose(whole(gradient), reference.inner.weight.grad, rtol=1e-12)


@pytest.mark.parametrize("engine", ["auto", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_engine_moves_chunks_in_its_way(size: int, engine: str) -> None:
    def body() -> list[str]:
        asked: list[str] = []
        for owner, name in (
            (torch.distributed, "broadcast"),
            (torch.distributed.ProcessGroup, "alltoall_base"),
        ):
            original = functools.partial(_counted, asked, name, getattr(owner, name))
            setattr(owner, name, functools.partialmethod(original) if isinstance(owner, type) else original)
        for name in ("_reduce_scatter", "_all_gather"):
            setattr(_moves, name, functools.partial(_counted, asked, name, getattr(_moves, name)))
        model, ours, reference, plain = both()
        for step in range(2):
            ours.zero_grad()
            plain.zero_grad()
            backward(model, reference, step)
            ours.step()
            plain.step()
        same(model, reference)
        same_state(ours.state_dict(), plain.state_dict())
        return sorted(set(asked))

    ways = {"auto": ["_all_gather", "_reduce_scatter"], "gloo": ["alltoall_base", "broadcast"]}
    assert run_ranks(size, body, engine=engine) == [ways[engine]] * size


def _counted(asked: list[str], name: str, function: Any, *args: Any, **options: Any) -> Any:
    asked.append(name)
    return function(*args, **options)


@ranks(3)
def test_some_ranks_share_an_optimizer() -> None:
    """Two ranks work on one model, and the third on its own."""
    some = hora.add_process_set([0, 2])
    model, reference = net(), net()
    make = OPTIMIZERS["adamw"]
    ours = sharded(model, make, process_set=some, bucket_mb=SMALL_BUCKETS)
    plain = make(reference.parameters())
    group = [0, 2] if some.included() else [1]
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(model, step).backward()
        for rank in group:
            (loss_of(reference, step, rank=rank) / len(group)).backward()
        ours.step()
        plain.step()
        same(model, reference)
    same_state(ours.state_dict(), plain.state_dict())
    if some.included():
        elements = sum(value.numel() for entries in ours.state.values() for value in entries.values())
        whole_state = sum(value.numel() for entries in plain.state.values() for value in entries.values())
        assert elements < 0.6 * whole_state


@ranks(2, 3)
def test_large_gradients_lie_in_the_memory_of_the_engine() -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(431, 337), nn.Tanh(), nn.Linear(337, 5)).double()

    model, reference = build(), build()
    ours, plain = sharded(model), OPTIMIZERS["adamw"](reference.parameters())
    inputs = torch.linspace(-1, 1, 6 * 431, dtype=torch.float64).view(6, 431)
    part = 6 // hora.size()
    for _ in range(3):
        ours.zero_grad()
        plain.zero_grad()
        model(inputs[hora.rank() * part : (hora.rank() + 1) * part]).square().mean().backward()
        reference(inputs).square().mean().backward()
        ours.step()
        plain.step()
    same(model, reference, tolerance=1e-9)  # Adam blows up the rounding of gradients near 0
    same_state(ours.state_dict(), plain.state_dict(), tolerance=1e-9)
    share = model[0].weight.grad
    assert isinstance(share, GradientShare)
    assert share.holder.seated  # type: ignore[attr-defined]

"""Micro-batches: however shares are cut, losses and gradients are those of the whole global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import ranks, run_ranks
from torch.nn.functional import mse_loss

import hora.torch as hora
from hora.core.errors import GlobalBatchError, GradientError
from hora.core.world import World

BATCH = 22
"""Does not divide by 3, 4, nor by most micro-batches."""


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def data(count: int = 88) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def reference(steps: int, batch: int, *, passes: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of plain torch on whole global batches."""
    model, (x, y) = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            place = ((step * passes + number) * batch) % 88
            loss = mse_loss(model(x[place : place + batch]), y[place : place + batch])
            (loss / passes).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, list(model.parameters())


def train(batch: int, micro: int, *, passes: int = 1, divide: bool = False, **options: Any) -> Any:
    """The same with a loader that cuts, on however many ranks there are."""
    model, rank, size = net(), hora.rank(), hora.size()
    loader = hora.data_loader(
        data(), global_batch=batch, micro_batch=micro, shuffle=False, tail="uneven" if divide else "pad"
    )
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        model,
        backward_passes_per_step=passes,
        **options,
    )
    losses = []
    for number, parts in enumerate(hora.track(loader)):
        if number % passes == 0:
            optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in parts:
            assert len(x) <= micro
            if divide:
                loss = mse_loss(model(x), y, reduction="sum") / loader.samples_per_worker
                total += loss.detach() / size
            else:
                loss = mse_loss(model(x), y)
                total += loss.detach() * len(x) / loader.samples_now
            loss.backward()
        losses.append(hora.allreduce(total, op=hora.Sum).item())
        if number % passes == passes - 1:
            optimizer.step()
    assert rank < size
    return losses, list(model.parameters())


def same(made: Any, wanted: Any) -> None:
    losses, parameters = made
    assert losses == pytest.approx(wanted[0], rel=1e-12, abs=1e-14)
    for one, other in zip(parameters, wanted[1], strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_cut_on_any_number_of_workers_is_the_whole_batch(size: int) -> None:
    def body() -> None:
        for micro in (1, 3, 4, 50):
            with uneven_allowed():
                same(train(BATCH, micro), reference(4, BATCH))
        same(train(BATCH, 4, divide=True), reference(4, BATCH))
        with uneven_allowed():
            same(train(BATCH, 4, passes=2), reference(2, BATCH, passes=2))
            same(train(11, 2, shard="optimizer"), reference(8, 11))
            same(train(11, 3, bucket_mb=1e-4), reference(8, 11))

    run_ranks(size, body)


class uneven_allowed:  # noqa: N801 - reads as a word
    """Shares that differ, as in an elastic job, where the number of workers is no choice of the script."""

    def __enter__(self) -> None:
        import hora.torch._loader as loader

        self.module: Any = loader
        self.before = loader.check_global_batch
        self.module.check_global_batch = lambda *_, **__: None

    def __exit__(self, *_: object) -> None:
        self.module.check_global_batch = self.before


@ranks(2)
def test_several_backward_passes_per_micro_batch_and_a_second_loop_over_them() -> None:
    model = net()
    loader = hora.data_loader(data(), global_batch=22, micro_batch=4, shuffle=False)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    parts = next(iter(loader))
    x, y = (part[:22] for part in data())
    whole = net()
    mse_loss(whole(x), y).backward()
    whole(x).mean().backward()
    for _ in range(2):
        optimizer.zero_grad()
        for own, wanted in parts:
            mse_loss(model(own), wanted).backward()
            model(own).mean().backward()
        optimizer.step()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    # Batches add up without zero_grad, as in plain torch: what was averaged counts once.
    optimizer.zero_grad()
    for parts in list_of(loader, 2):
        for own, wanted in parts:
            mse_loss(model(own), wanted).backward()
    whole.zero_grad()
    for start in (0, 22):
        x, y = (part[start : start + 22] for part in data())
        mse_loss(whole(x), y).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def list_of(loader: Any, count: int) -> Any:
    for number, parts in enumerate(loader):
        if number == count:
            return
        yield parts


@ranks(2)
def test_what_belongs_behind_the_loop_says_so() -> None:
    model = net()
    loader = hora.data_loader(data(), global_batch=22, micro_batch=4, shuffle=False)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for parts in list_of(loader, 1):
        assert len(parts) == 3
        for number, (x, y) in enumerate(parts):
            if number == 1:
                with pytest.raises(GradientError, match=r"zero_grad\(\) came at micro-batch 2 of 3"):
                    optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if number == 1:
                with pytest.raises(GradientError, match=r"step\(\) came after micro-batch 2 of 3"):
                    optimizer.step()
        mse_loss(model(x), y).backward()  # behind the loop, it is a plain pass
        optimizer.step()


@pytest.mark.parametrize("micro", [0, True, 2.5])
def test_no_number_of_samples_is_refused(micro: Any) -> None:
    hora.init(World())
    try:
        with pytest.raises(GlobalBatchError, match="micro_batch="):
            hora.data_loader(data(), global_batch=22, micro_batch=micro)
    finally:
        hora.shutdown()

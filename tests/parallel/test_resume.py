"""A training that was stopped anywhere goes on as if it had not been, on any number of workers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch.nn import functional as F
from torch.utils.data import Dataset

import hora.torch as hora

SAMPLES, BATCH, EPOCHS = 41, 12, 3
"""Three steps and a tail of five samples in each epoch; 1, 2, 3 and 4 workers divide the batch."""

MIDDLE = 5
"""Steps until the stop: in the midst of the second epoch."""


class Points(Dataset[Any]):
    """Sample ``i`` has its number, six coordinates and a value, with noise drawn anew in each epoch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        place = torch.linspace(0, 1, 6, dtype=torch.float64) * (1 + index)
        noise = torch.rand(6, dtype=torch.float64) + random.random() + np.random.rand()
        return index, torch.sin(place) + 0.1 * noise, torch.cos(place).sum(0, keepdim=True)


@dataclass(frozen=True)
class Plan:
    """How the training is built.

    Attributes:
        optimizer: ``sgd`` or ``adam``.
        dropout: probability; what is dropped depends on the number of workers.
        num_workers: loader processes per rank.
        persistent: whether those stay from epoch to epoch.
        tail: as of ``data_loader``.
        shard: as of ``DistributedOptimizer``.
        noise: whether the step adds numbers of numpy's and Python's streams.
    """

    optimizer: str = "sgd"
    dropout: float = 0.0
    num_workers: int = 0
    persistent: bool = False
    tail: Any = "drop"
    shard: Any = None
    noise: bool = False


Step = tuple[list[int], float]
"""The samples of the global batch in order, and the loss over them."""


def train(folder: str, plan: Plan, *, save_at: int | None = None, stop_at: int | None = None) -> list[Step]:
    """Train on this rank; the steps that it made. ``save_at`` goes on after saving, ``stop_at`` does not."""
    torch.manual_seed(100 + hora.rank())  # dropout differs between ranks; the weights are rank 0's
    np.random.seed(hora.rank())
    random.seed(hora.rank())
    loader = hora.data_loader(
        Points(),
        global_batch=BATCH,
        seed=7,
        tail=plan.tail,
        num_workers=plan.num_workers,
        persistent_workers=plan.persistent,
        prefetch_factor=3 if plan.num_workers else None,
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        hora.SyncBatchNorm(8),
        torch.nn.Tanh(),
        torch.nn.Dropout(plan.dropout),
        torch.nn.Linear(8, 1),
    ).double()
    if plan.optimizer == "adam":
        plain: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = hora.DistributedOptimizer(plain, model, **({"shard": plan.shard} if plan.shard else {}))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 4)
    hora.broadcast_parameters(model)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    checkpoints = hora.Checkpoints(state, directory=folder)
    checkpoints.restore()
    steps: list[Step] = []
    progress = hora.track(loader, epochs=EPOCHS)
    for indices, x, y in progress:
        optimizer.zero_grad()
        error = F.mse_loss(model(x), y, reduction="sum") / loader.samples_per_worker
        error.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if plan.noise:
            with torch.no_grad():
                model[4].bias += 1e-3 * hora.mean(np.random.rand() + random.random())
        optimizer.step()
        schedule.step()
        checkpoints.step()
        seen = [number for part in hora.allgather_object(indices.tolist()) for number in part]
        steps.append((seen, hora.mean(error)))
        if progress.step == save_at:
            checkpoints.save().wait()
        if progress.step == stop_at:
            checkpoints.save().wait()
            break
    return steps


def run(size: int, folder: Path | str, plan: Plan, **options: Any) -> list[Step]:
    results = run_ranks(size, lambda: train(str(folder), plan, **options))
    assert all(result == results[0] for result in results)
    return results[0]


def compare(found: list[Step], wanted: list[Step], *, tolerance: float) -> None:
    assert [seen for seen, _ in found] == [seen for seen, _ in wanted]
    losses, expected = [loss for _, loss in found], [loss for _, loss in wanted]
    assert losses == pytest.approx(expected, rel=tolerance, abs=0)


PLAN = Plan(num_workers=2, persistent=True)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[int, tuple[Path, list[Step]]]]:
    """By number of workers: a checkpoint from the midst of a training, and all steps of that training."""
    with tempfile.TemporaryDirectory(prefix="hora-resume-") as folder:
        yield {
            size: (Path(folder, str(size)), run(size, Path(folder, str(size)), PLAN, save_at=MIDDLE))
            for size in (1, 2, 3, 4)
        }


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_any_number_of_workers_goes_on_from_any_other(
    runs: dict[int, tuple[Path, list[Step]]], before: int, after: int
) -> None:
    folder, whole = runs[before]
    assert len(whole) == 9
    rest = run(after, folder, PLAN)
    compare(rest, whole[MIDDLE:], tolerance=1e-12 if before == after else 1e-9)


def test_all_numbers_of_workers_train_alike_and_saving_changes_nothing(
    runs: dict[int, tuple[Path, list[Step]]], tmp_path: Path
) -> None:
    unsaved = run(2, tmp_path, PLAN)
    compare(unsaved, runs[2][1], tolerance=1e-15)
    for size in (1, 3, 4):
        compare(runs[size][1], unsaved, tolerance=1e-9)


@pytest.mark.parametrize(("size", "stop_at"), [(2, 1), (2, 2), (3, 3), (2, 4), (3, 8)])
def test_wherever_it_stops(tmp_path: Path, size: int, stop_at: int) -> None:
    plan = Plan(optimizer="adam", dropout=0.3, num_workers=1, noise=True)
    whole = run(size, tmp_path / "whole", plan)
    first = run(size, tmp_path / "parts", plan, stop_at=stop_at)
    assert len(first) == stop_at
    compare([*first, *run(size, tmp_path / "parts", plan)], whole, tolerance=1e-12)


@pytest.mark.parametrize("tail", ["pad", "uneven"])
def test_with_each_kind_of_tail(tmp_path: Path, tail: Any) -> None:
    plan = Plan(tail=tail, num_workers=2)
    whole = run(3, tmp_path / "whole", plan)
    assert len(whole) == 12
    first = run(3, tmp_path / "parts", plan, stop_at=7)
    compare([*first, *run(2, tmp_path / "parts", plan)], whole, tolerance=1e-9)


@pytest.mark.parametrize(
    ("before", "after"), [("optimizer", "optimizer"), ("optimizer", None), (None, "optimizer")]
)
def test_with_a_sharded_optimizer(tmp_path: Path, before: Any, after: Any) -> None:
    whole = run(2, tmp_path / "whole", Plan(optimizer="adam"))
    first = run(2, tmp_path / "parts", Plan(optimizer="adam", shard=before), stop_at=4)
    rest = run(3, tmp_path / "parts", Plan(optimizer="adam", shard=after))
    compare([*first, *rest], whole, tolerance=1e-9)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1)])
def test_random_streams_on_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    """What the script seeds alike stays alike; what it seeds by rank stays different."""

    def body(resumed: bool) -> tuple[float, float, float, float]:
        torch.manual_seed(hora.rank())
        np.random.seed(5)
        random.seed(6)
        checkpoints = hora.Checkpoints({"step": 1}, directory=tmp_path)
        if resumed:
            assert checkpoints.restore() == 0
        else:
            np.random.rand(3), random.random()
            checkpoints.save().wait()
        return torch.rand(()).item(), np.random.rand(), random.random(), torch.rand(()).item()

    first, rest = run_ranks(before, body, False), run_ranks(after, body, True)
    assert run_ranks(after, body, True) == rest  # a function of the checkpoint, and of nothing else
    assert {draws[1:3] for draws in rest} == {first[0][1:3]}
    assert len({draws[0] for draws in rest}) == after
    if after > 1:
        assert not {draws[0] for draws in rest} & {draws[0] for draws in first}


def test_state_lies_in_memory_as_its_parameter_does(tmp_path: Path) -> None:
    """Fused steps go through memory: momentum in another order would go to the wrong weights."""

    def body(stop_at: int, most: int) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        checkpoints = hora.Checkpoints(
            {"model": model, "optimizer": optimizer}, directory=tmp_path / str(stop_at)
        )
        checkpoints.restore()
        losses = []
        for step in range(checkpoints.steps, most):
            x = torch.sin(torch.arange(2 * 3 * 5 * 5, dtype=torch.float64) * (1 + step)).reshape(2, 3, 5, 5)
            optimizer.zero_grad()
            error = model(x).square().mean()
            error.backward()
            optimizer.step()
            losses.append(error.item())
            checkpoints.step()
        checkpoints.save().wait()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert momentum.stride() == model.weight.stride() == (27, 1, 9, 3)
        return losses

    (whole,) = run_ranks(1, body, 6, 6)
    (first,), (rest,) = run_ranks(1, body, 3, 3), run_ranks(1, body, 3, 6)
    assert first + rest == whole


def test_stopped_and_resumed_again_and_again(tmp_path: Path) -> None:
    plan = Plan(dropout=0.2, num_workers=2, noise=True)
    whole = run(2, tmp_path / "whole", plan)
    parts: list[Step] = []
    for stop_at in (2, 3, 6, 7, None):
        parts += run(2, tmp_path / "parts", plan, stop_at=stop_at)
    compare(parts, whole, tolerance=1e-12)

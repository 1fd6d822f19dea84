"""The size of buckets is found out while the job trains, and changes no bit of the result."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.ranks import ranks, run_ranks
from torch import nn

import hora.torch as hora
from hora.torch._tuning import COUNTED, SETTLING, SIZES, UNTIMED

STEPS = UNTIMED + len(SIZES) * (SETTLING + COUNTED) + 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))  # 6 MB: buckets of 1, 4 and 25 MB differ


def trained(bucket_mb: float | None, *, steps: int = STEPS) -> tuple[nn.Module, hora.DistributedOptimizer]:  # type: ignore[valid-type]
    net = model()
    hora.broadcast_parameters(net)
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), net, bucket_mb=bucket_mb
    )
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * step + hora.rank())
        net(torch.randn(2, 512, generator=generator)).square().mean().backward()
        optimizer.step()
    return net, optimizer


@ranks(2, 3)
def test_results_have_the_same_bits() -> None:
    fixed, _ = trained(25.0)
    tuned, optimizer = trained(None)
    tuning = optimizer._hora.reducer._tuning
    assert tuning.done
    assert set(tuning.times) == {1.0, 4.0, 25.0}
    assert len(set(hora.allgather_object(tuning.size))) == 1
    for ours, theirs in zip(tuned.parameters(), fixed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@ranks(2)
def test_a_given_size_is_not_tuned() -> None:
    _, optimizer = trained(4.0, steps=1)
    assert optimizer._hora.reducer._tuning.done


@ranks(3)
def test_a_rank_that_joins_meanwhile() -> None:
    for spare in (UNTIMED + 3, STEPS - 4):
        net, _ = trained(None, steps=STEPS if hora.rank() == 0 else spare)
        hora.join()
        parameters = [parameter.detach() for parameter in net.parameters()]
        for parameter in parameters:
            assert torch.equal(parameter, hora.broadcast(parameter, 0))


def test_the_choice_is_written_down(tmp_path: Path) -> None:
    def body() -> None:
        trained(None)

    run_ranks(2, body, run_dir=tmp_path / "run")
    buckets = json.loads((tmp_path / "run" / "run.json").read_text())["buckets"]
    assert buckets["chosen_mb"] in SIZES
    assert set(buckets["milliseconds_per_step"]) == {"1 MB", "4 MB", "25 MB"}

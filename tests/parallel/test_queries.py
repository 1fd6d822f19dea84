"""What can be asked, and the timeline of a part of a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import UsageError
from hora.core.settings import Settings
from hora.core.world import World


@ranks(2)
def test_capabilities_are_those_of_this_pytorch() -> None:
    assert hora.gloo_built()
    assert hora.gloo_enabled()
    assert bool(hora.nccl_built()) == torch.distributed.is_nccl_available()
    assert hora.cuda_built() == (torch.version.cuda is not None)
    assert hora.rocm_built() == (torch.version.hip is not None)
    for absent in (
        hora.mpi_built,
        hora.mpi_enabled,
        hora.mpi_threads_supported,
        hora.ddl_built,
        hora.ccl_built,
    ):
        assert absent() is False
    assert hora.is_homogeneous()


def test_hosts_of_different_size_are_not_homogeneous() -> None:
    assert run_ranks(3, homogeneous, init=False) == [False] * 3


def homogeneous(world: World, settings: Settings) -> bool:
    host, local = divmod(world.rank, 2)
    hora.init(
        World(
            rank=world.rank,
            size=3,
            local_rank=local,
            local_size=2 - host,
            host_index=host,
            host_count=2,
            source="test",
        ),
        settings=settings,
    )
    return hora.is_homogeneous()


def test_a_timeline_of_some_steps(tmp_path: Path) -> None:
    run_ranks(2, record, str(tmp_path))
    names = [
        [event["args"].get("name") for event in json.loads((tmp_path / file).read_text())["traceEvents"]]
        for file in ("some.json", "last.json")
    ]
    assert [[name for name in own if name and "rank" not in name] for own in names] == [
        ["collectives", "inside"],
        ["collectives", "at the end"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.json", "some.json"]


def record(folder: str) -> None:
    hora.allreduce(torch.ones(1), name="before")
    hora.start_timeline(f"{folder}/some.json", mark_cycles=True)
    with pytest.raises(UsageError, match=r"recorded for .*some\.json"):
        hora.start_timeline(f"{folder}/other.json")
    hora.allreduce(torch.ones(1), name="inside")
    hora.stop_timeline()
    hora.stop_timeline()
    hora.allreduce(torch.ones(1), name="after")
    hora.start_timeline(f"{folder}/last.json")
    hora.allreduce(torch.ones(1), name="at the end")  # shutdown writes it

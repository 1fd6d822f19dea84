"""Ranks that cannot share memory: all of them find out, go on with Gloo and say so once, or raise."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core import futex
from hora.core.errors import WorldError
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch.engines import Group, _create, _memory, _team

Patch = Callable[[], None]


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EPERM, "refused here")


def no_memory() -> None:
    os.memfd_create = refuse  # type: ignore[assignment]


def no_way_in() -> None:
    _memory.Segment.open = refuse  # type: ignore[method-assign]


def no_watching() -> None:
    os.pidfd_open = refuse  # type: ignore[assignment]


def no_birth() -> None:
    _team._birth = refuse


def no_futexes() -> None:
    def call(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    futex._quick = call


def too_many() -> None:
    futex.MOST = 1


def other_namespace() -> None:
    machine = _create._host().split()[0]
    _create._host = lambda: f"{machine} container"


PATCHES: list[tuple[Patch, int]] = [
    (no_memory, 0),  # the rank that makes the memory
    (no_way_in, 1),
    (no_watching, 0),
    (no_watching, 1),
    (no_birth, 1),
    (no_futexes, 0),
    (no_futexes, 1),
    (too_many, 0),
    (other_namespace, 1),
]


def entries(folder: str) -> int:
    return len(list(Path("/proc/self", folder).iterdir()))


@pytest.mark.parametrize(
    ("patch", "where"), PATCHES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_one_rank_cannot(patch: Patch, where: int) -> None:
    def body(world: World, settings: Settings) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hora").addHandler(handler)
        if world.rank == where:
            patch()
        hora.init(world, settings=settings)
        assert not isinstance(dist.group.WORLD, Group)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2] * 3
        return said

    first, second = run_ranks(2, body, init=False)
    assert len(first) == 1
    assert "The ranks cannot share memory, so Gloo carries their data, more slowly" in first[0]
    assert second == []

    def insist(world: World, settings: Settings) -> str:
        if world.rank == where:
            patch()
        with pytest.raises(
            WorldError, match="HORA_ENGINE=shared-memory, but the ranks cannot share"
        ) as raised:
            hora.init(world, settings=settings)
        assert not dist.is_initialized()
        return str(raised.value)

    texts = run_ranks(2, insist, init=False, engine="shared-memory")
    assert texts[0] == texts[1]


def test_insisting_where_memory_can_be_shared() -> None:
    def body() -> bool:
        return isinstance(dist.group.WORLD, Group)

    for size in (1, 2):
        assert run_ranks(size, body, engine="shared-memory") == [True] * size
        assert run_ranks(size, body, engine="gloo") == [False] * size


def test_insisting_on_a_group_that_the_script_made() -> None:
    def body(world: World, settings: Settings) -> None:
        assert settings.store is not None
        store = dist.FileStore(settings.store.removeprefix("file://"), world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        with pytest.raises(WorldError, match="the script made a group of 'gloo' itself"):
            hora.init(world, settings=settings)
        dist.destroy_process_group()

    run_ranks(2, body, init=False, engine="shared-memory")


@ranks(2, 3)
def test_no_shared_memory_for_a_vector() -> None:
    group: Any = dist.group.WORLD
    for patch, where in ((no_way_in, 1), (no_memory, 0)):
        if hora.rank() == where:
            patch()
        vector = group.empty(1_000_000, torch.float32)
        vector.fill_(hora.rank() + 1)
        dist.all_reduce(vector)
        assert torch.equal(vector, torch.full_like(vector, sum(range(1, hora.size() + 1))))


def test_nothing_is_left_after_many_lives() -> None:
    def body(world: World, settings: Settings) -> None:
        counts = []
        for _ in range(20):
            hora.init(world, settings=settings)
            group: Any = dist.group.WORLD
            vector = group.empty(100_000, torch.float32)
            work = dist.all_reduce(vector, async_op=True)
            dist.new_group([0, 1])
            work.wait()
            del vector, work, group
            hora.shutdown()
            mapped = Path("/proc/self/maps").read_text().count("memfd:hora")
            counts.append((entries("fd"), entries("task"), mapped))
        assert counts[-1] == counts[4], counts

    run_ranks(2, body, init=False)

"""Ranks without a supervisor: the log names who has not come, once, long before the timeout."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World


def listen() -> list[str]:
    """What the engine says on this rank from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hora").addHandler(handler)
    return said


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


@pytest.mark.alone
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_rank_that_waits_names_those_that_do_not_come(asynchronous: bool) -> None:
    """Ranks 0 and 2 come late, one after the other: rank 1 has said it by the time rank 0 could."""

    def body() -> list[str]:
        said = listen()
        dist.barrier()
        dist.barrier()
        rank = hora.rank()
        if rank == 1:
            threading.Timer(0.9, lambda: store().set("first", "1")).start()
            threading.Timer(1.8, lambda: store().set("second", "1")).start()
        elif rank in (0, 2):
            store().wait(["second" if rank == 2 else "first"], timedelta(seconds=10))
        work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
        if asynchronous:
            work.wait()
        for _ in range(3):
            dist.barrier()
        return said

    told = run_ranks(4, body, stall_warning=0.3)
    assert [len(lines) for lines in told] == [0, 1, 0, 0], told
    words, _, seconds = told[1][0].removesuffix(" seconds.").rpartition(" for ")
    assert words.startswith("Rank 1 waits in all_reduce SUM of 3 elements of float32, collective ")
    assert words.endswith(" of its group: ranks 0, 2 have not come")
    assert float(seconds) < 2


def test_each_stall_is_named_and_short_waits_are_not() -> None:
    def body(world: World, settings: Settings) -> list[str]:
        hora.init(world, settings=settings)
        said = listen()
        for key in ("first", "second"):
            if hora.rank() == 0:
                threading.Timer(0.7, lambda key=key: store().set(key, "1")).start()
            else:
                store().wait([key], timedelta(seconds=10))
            dist.broadcast(torch.ones(2), 0)
            dist.broadcast(torch.ones(2), 1)
        return said

    first, second = run_ranks(2, body, init=False, stall_warning=0.2)
    assert [line.split(":")[1][:26] for line in first] == [" rank 1 has not come for 0"] * 2
    assert second == []
    numbers = [int(line.split("collective ")[1].split()[0]) for line in first]
    assert numbers[1] - numbers[0] == 2
    for silent in (0.0, 30.0):
        assert run_ranks(2, body, init=False, stall_warning=silent) == [[], []]


def test_a_sharded_optimizer_waits_on_gloo_as_long_as_it_is_told() -> None:
    """As under the guard, while another rank is in ``hora.only``."""
    from hora.torch.shard._moves import start_scatter

    def body() -> None:
        group = dist.group.WORLD
        assert group is not None
        output = torch.empty(2)
        if hora.rank() == 1:
            store().wait(["later"], timedelta(seconds=10))
        else:
            threading.Timer(2.0, lambda: store().set("later", "1")).start()
        start_scatter(output, torch.ones(4), group, timeout=timedelta(seconds=20)).wait()
        assert output.tolist() == [2, 2]

    run_ranks(2, body, engine="gloo", timeout=1.0)

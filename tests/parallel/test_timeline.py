"""What the timeline of a training holds: enough to say where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.events import Event
from hora.core.rundir import RunDirectory
from hora.core.settings import Settings
from hora.core.trace import read_run
from hora.core.world import World
from hora.report import Account, account


def recorded(path: Path, body: Callable[[], None]) -> tuple[Account, list[list[Event]]]:
    """The account of a run of two ranks, and their events."""

    def rank(world: World, settings: Settings) -> None:
        hora.init(world, settings=Settings(**{**vars(settings), "run_dir": path}))
        body()

    run_ranks(2, rank, init=False)
    run = RunDirectory.open(path)
    return account(run), [recording.events for recording in read_run(run).values()]


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


def training(batches: object, *, slow: float = 0.0) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hora.broadcast_parameters(model)
    for (x,) in batches:  # type: ignore[attr-defined]
        if hora.rank() == 1:
            time.sleep(slow)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_a_training_with_the_loader(tmp_path: Path) -> None:
    def body() -> None:
        training(hora.track(hora.data_loader((torch.ones(20, 2),), global_batch=4)), slow=0.02)

    found, ranks = recorded(tmp_path / "run", body)
    for events in ranks:
        for name in (
            "wait for data",
            "step",
            "backward",
            "optimizer",
            "wait for gradients",
            "average gradients",
        ):
            assert len(named(events, name)) == 5, name
        # A step begins with its batch, holds backward and optimizer, and ends before the next is asked for.
        for data, step, backward, optimizer in zip(
            *(named(events, name) for name in ("wait for data", "step", "backward", "optimizer")), strict=True
        ):
            assert data.stop == step.start <= backward.start <= backward.stop <= optimizer.start
            assert optimizer.stop <= step.stop
        assert events[0].name == "init"
        assert events[-1].name == "shutdown"
    assert found.missing == []
    fast, slow = found.ranks.values()
    # Rank 1 sleeps 5 times 20 ms inside its steps; rank 0 stands in the average meanwhile.
    assert slow.compute >= 0.1
    assert fast.communication >= 0.08
    assert slow.work > fast.work
    assert abs(found.clocks[1].offset) < 0.01
    assert found.clocks[1].shared


def test_a_training_with_a_loader_of_its_own(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset[tuple[torch.Tensor]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            time.sleep(0.02)
            return (torch.ones(2),)

    def body() -> None:
        training(hora.track(torch.utils.data.DataLoader(Slow()), epochs=2))

    found, ranks = recorded(tmp_path / "run", body)
    assert [len(named(events, "wait for data")) for events in ranks] == [6, 6]
    assert [len(named(events, "step")) for events in ranks] == [6, 6]
    assert all(one.data >= 0.12 and one.data_seen for one in found.ranks.values())


def test_a_training_without_a_loader(tmp_path: Path) -> None:
    found, ranks = recorded(tmp_path / "run", lambda: training([(torch.ones(2, 2),)] * 4, slow=0.01))
    assert [len(named(events, "optimizer")) for events in ranks] == [4, 4]
    assert not any(one.data_seen for one in found.ranks.values())
    assert found.ranks[1].compute >= 0.03  # three whole steps


def test_what_is_hidden_behind_work_does_not_count(tmp_path: Path) -> None:
    def body() -> None:
        handle = hora.allreduce_async(torch.ones(4))
        time.sleep(0.1)
        hora.synchronize(handle)

    found, ranks = recorded(tmp_path / "run", body)
    for events, one in zip(ranks, found.ranks.values(), strict=True):
        (event,) = named(events, "allreduce")
        assert event.stop - event.start >= 0.1
        assert event.args["started"] + event.args["waited"] <= event.stop - event.start - 0.09
        assert one.communication <= one.wall - 0.09


def test_operations_of_a_process_set_say_so(tmp_path: Path) -> None:
    def body() -> None:
        some = hora.add_process_set([1])
        if some.included():
            hora.allreduce(torch.ones(1), process_set=some)
        hora.allreduce(torch.ones(1))

    _, ranks = recorded(tmp_path / "run", body)
    assert [[event.args.get("process_set") for event in named(events, "allreduce")] for events in ranks] == [
        [None],
        [1, None],
    ]

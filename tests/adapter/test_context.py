"""What every adapter builds on: ranks meet, agree, and exchange objects, without a framework."""

from __future__ import annotations

import json
import math
import pickle
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.adapter.stage import Set, current, init, on_ranks, shutdown
from tests.ranks import run_ranks

from hora.adapter import meeting, metrics, objects, process_sets, timeline
from hora.adapter.agreement import agree, require_same, rows
from hora.adapter.context import Context
from hora.adapter.guard import Spec
from hora.core.errors import (
    AlreadyInitializedError,
    CollectiveError,
    GradientError,
    HoraError,
    NotInitializedError,
    WorldError,
)
from hora.core.events import read_events
from hora.core.rundir import RunDirectory
from hora.core.settings import Settings
from hora.core.world import World


def problem(call: Callable[[], Any]) -> str:
    with pytest.raises(HoraError) as caught:
        call()
    return str(caught.value)


def test_one_worker_is_a_job_too() -> None:
    with pytest.raises(NotInitializedError, match=r"tests.adapter.stage.rank\(\) was called before"):
        current.rank()
    init(World(), Settings())
    try:
        assert (current.rank(), current.size(), current.local_rank(), current.local_size()) == (0, 1, 0, 1)
        assert (current.cross_rank(), current.cross_size(), current.is_homogeneous()) == (0, 1, True)
        assert pickle.loads(pickle.dumps(current.rank))() == 0
        with pytest.raises(AlreadyInitializedError, match=re.escape(f"at {Path(__file__)}:")):
            init(World(), Settings())
        context = current.required("test")
        assert objects.allgather_object(context, {"a": 1}) == [{"a": 1}]
        assert metrics.mean(context, {"loss": 2.0}, 3.0) == {"loss": 2.0}
        assert math.isnan(metrics.mean(context, {"loss": 2.0}, 0.0)["loss"])
        assert rows(context, [4, 5]) == [[4, 5]]
        assert agree(context, "allreduce", "x", [Spec("float32", (2,))]) is None
        with pytest.raises(CollectiveError, match="weight=-1"):
            metrics.mean(context, {"loss": 2.0}, -1.0)
    finally:
        shutdown()
    shutdown()  # without init() it does nothing
    assert not current.is_initialized()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_exchange_objects_and_means(size: int) -> None:
    def body(context: Context) -> None:
        rank = context.world.rank
        for root in range(size):
            found = objects.broadcast_object(context, {"from": rank, "data": np.arange(rank + 1)}, root)
            assert found["from"] == root
            assert found["data"].tolist() == list(range(root + 1))
        assert objects.allgather_object(context, "x" * rank) == ["x" * other for other in range(size)]
        for bad in (lambda: None, threading.Lock()):
            mine = bad if rank == 1 else 0
            assert "The object of rank 1 cannot be pickled" in problem(
                lambda mine=mine: objects.allgather_object(context, mine)
            )
            assert "The object of rank 1 cannot be pickled" in problem(
                lambda mine=mine: objects.broadcast_object(context, mine, 1)
            )
        assert "root_rank=9" in problem(lambda: objects.broadcast_object(context, 0, 9))
        # 0.1 * 1 + 0.2 * 2 + ... over 1 + 2 + ...; rank 0 alone has nan, with weight 0.
        weights = [float(other) for other in range(size)]
        values = [math.nan, *(0.1 * other for other in range(1, size))]
        exact = math.fsum(w * v for w, v in zip(weights, values, strict=True) if w) / math.fsum(weights)
        found = metrics.mean(context, {"b": values[rank], "a": 1.0}, weights[rank])
        assert found == {"b": exact, "a": 1.0}
        assert list(found) == ["b", "a"]
        told = metrics.mean(context, {"inf": math.inf if rank else -math.inf}, 1.0)
        assert math.isnan(told["inf"])
        name = "ab"[rank > 0]
        text = problem(lambda: metrics.mean(context, {name: 1.0}, 1.0))
        assert f"rank {rank} gave {name!r}" in text
        assert rows(context, [rank, 7]) == [[other, 7] for other in range(size)]

    on_ranks(size, body)


def test_ranks_agree_before_anything_starts() -> None:
    def body(context: Context) -> None:
        rank = context.world.rank

        def ask(kind: str, name: str | None, dtype: Any, *shape: int, **details: Any) -> None:
            assert agree(context, kind, name, [Spec(dtype, shape)], **details) is None

        ask("allreduce", "w", np.dtype("float32"), 3, 4, operation="average")
        ask("allreduce", "w", np.dtype("float32"), 3, 4, operation="average")
        ask("allgather", "rows", "float32", rank, 4)  # first dimensions may differ
        ask("alltoall", None, "float32", 2 * rank, 4)
        for differs, call in {
            "The shape differs: (3, 2) and (3, 3)": lambda: ask("allreduce", "w", "float32", 3, 2 + rank),
            "The dtype differs: float32 and float64": lambda: ask(
                "allreduce", "w", ["float32", "float64"][rank], 3
            ),
            "The operation differs: average and sum": lambda: ask(
                "allreduce", "w", "int32", 3, operation=["average", "sum"][rank]
            ),
            "The root differs: 0 and 1": lambda: ask("broadcast", "w", "int32", 3, root=rank),
            "The collective differs: allreduce and broadcast": lambda: ask(
                ["allreduce", "broadcast"][rank], "w", "int8", 3
            ),
            "The name differs: w and v": lambda: ask("allreduce", "wv"[rank], "int8", 9),
            "The shape differs: (4,) and (5,)": lambda: ask("allgather", "g", "float32", 3, 4 + rank),
        }.items():
            text = problem(call)
            assert differs in text, text
            assert "rank 0 calls" in text
            assert f"test_context.py:{ask.__code__.co_firstlineno + 1}" in text
        ask("allreduce", "w", "float32", 8)  # and it goes on

        def same(items: list[str]) -> None:
            require_same(
                items,
                context,
                function="broadcast_variables",
                what="The variables",
                fix="Build the same model.",
                error=GradientError,
            )

        same(["a (3,)", "b"])
        assert "The variables differ between ranks: number 1 is b0 on rank 0 and b1 on rank 1" in problem(
            lambda: same(["a", f"b{rank}"])
        )
        assert "rank 0 has 1 of them and rank 1 has 2" in problem(lambda: same(["a", "b"][: rank + 1]))

    on_ranks(2, body)


def test_process_sets() -> None:
    def body(context: Context) -> None:
        rank = context.world.rank
        made = process_sets.add(Set([2, 0]), context)
        assert (made.process_set_id, made.ranks, made.size()) == (1, [0, 2], 2)
        assert (made.included(), made.rank()) == (rank != 1, {0: 0, 1: None, 2: 1}[rank])
        assert process_sets.ids(context) == [0, 1]
        assert process_sets.included(context, 1) == (rank != 1)
        assert "exists already: its id is 1" in problem(lambda: process_sets.add(Set([0, 2]), context))
        assert "exists already: its id is 0" in problem(lambda: process_sets.add(Set([0, 1, 2]), context))
        assert "it is empty" in problem(lambda: process_sets.add(Set([]), context))
        assert "3 is no rank" in problem(lambda: process_sets.add(Set([3]), context))
        assert "number 0 is [0] on rank 0 and [1] on rank 1" in problem(
            lambda: process_sets.add(Set([min(rank, 1)]), context)
        )
        assert "There is no process set with id 7" in problem(lambda: process_sets.included(context, 7))
        if rank != 1:
            found = objects.allgather_object(context, rank, process_set=made)
            assert found == [0, 2]
            assert objects.broadcast_object(context, rank, 2, process_set=made) == 2
            assert agree(context, "allreduce", None, [Spec("f", ())], process_set=made) is None
            assert process_sets.member_set(made, function="allreduce", kind=Set) is made
        else:
            text = problem(lambda: process_sets.member_set(made, function="allreduce", kind=Set))
            assert "rank 1 is not in ProcessSet(process_set_id=1" in text
        assert process_sets.remove(made, context)
        assert not process_sets.remove(made, context)
        assert (made.size(), process_sets.ids(context)) == (None, [0])
        assert "was not added" in problem(lambda: process_sets.member_set(made, function="x", kind=Set))
        again = process_sets.add(made, context)
        assert again.process_set_id == 2
        shutdown()
        assert again.process_set_id is None

    on_ranks(3, body)


def test_ranks_of_several_hosts_and_a_second_init(tmp_path: Path) -> None:
    def body(world: World, settings: Settings) -> list[Any]:
        # Ranks 0 and 1 on one host, rank 2 on another, as their launcher says.
        host = world.rank // 2
        told = replace(world, local_rank=world.rank % 2, local_size=2 - host, host_index=host, host_count=2)
        found: list[Any] = []
        for _ in range(2):
            context = init(told, settings, frameworks={"stage": "1"})
            found.append(
                (context.peers, current.cross_rank(), current.cross_size(), current.is_homogeneous())
            )
            timeline.start(context, tmp_path / "part.json")
            objects.allgather_object(context, 0, name="mine")
            timeline.stop(context)
            shutdown()
        return found

    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = run_ranks(3, body, init=False, store=f"tcp://127.0.0.1:{port}", run_dir=run)
    assert found == [
        [((0, 2), 0, 2, False)] * 2,
        [((1,), 0, 1, False)] * 2,
        [((0, 2), 1, 2, False)] * 2,
    ]
    about = RunDirectory.open(run).about()
    assert about["versions"]["stage"] == "1"
    assert about["guard"] == "off"
    assert [event.name for event in read_events(RunDirectory.open(run).events(2)).events].count("init") == 2
    assert "allgather_object" in (tmp_path / "part.json").read_text()
    assert json.loads((run / "run.json").read_text())["world"]["size"] == 3


def test_what_keeps_ranks_from_meeting() -> None:
    def absent(world: World, settings: Settings) -> str:
        if world.rank == 2:
            return ""
        return problem(lambda: init(world, settings))

    found = run_ranks(3, absent, init=False, timeout=0.5)
    late = re.compile(r"Rank 2 did not come to 'init\(\) \(init \d+\)' within 0.5 s")
    assert late.match(found[0]), found
    assert late.match(found[1]) or "Rank 0, which keeps" in found[1]  # it may end with the store meanwhile

    def different(world: World, settings: Settings) -> str:
        current.module = f"hora.{'ab'[world.rank]}"
        return problem(lambda: init(world, settings))

    found = run_ranks(2, different, init=False)
    assert found == [found[0]] * 2
    assert "Rank 0 calls hora.a.init(), and rank 1 hora.b.init()" in found[0]

    def second(world: World, settings: Settings) -> str:
        meeting.claim(meeting.address(world, settings), "hora.torch")
        return problem(lambda: init(world, settings))

    assert "have met for hora.torch already" in run_ranks(2, second, init=False)[0]

    def engine_fails(world: World, settings: Settings) -> str:
        def start(context: Context) -> None:
            if context.world.rank == 1:
                raise CollectiveError("The engine does not start.", fix="Start it.")

        def attempt() -> None:
            try:
                init(world, settings, start=start)
            finally:
                if world.rank == 1:
                    for one in meeting._stores.values():
                        one.close()  # as the end of its process does

        text = problem(attempt)
        assert not current.is_initialized()
        return text

    found = run_ranks(2, engine_fails, init=False)
    assert "Rank 1 ended before 'start of the engine" in found[0]
    assert "The engine does not start" in found[1]
    elastic = problem(lambda: init(World(), Settings(elastic_fd=7)))
    assert "--restarts" in elastic


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "does not know where to meet"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port"),
    ],
)
def test_where_to_meet_must_be_told(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = World(rank=1, size=4, local_rank=0, local_size=2, host_index=1, host_count=2, source="test")
    with pytest.raises(WorldError, match=text):
        meeting.address(world, Settings())
    with pytest.raises(WorldError, match="neither tcp://HOST:PORT nor file:///PATH"):
        meeting.address(world, Settings(store="http://x"))


def test_master_addr_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def body(context: Context) -> list[int]:
        return objects.allgather_object(context, context.world.rank)

    assert on_ranks(2, body, store=None) == [[0, 1]] * 2
    with socket.create_server(("127.0.0.1", port)):

        def taken(world: World, settings: Settings) -> str:
            return problem(lambda: init(world, settings)) if world.rank == 0 else ""

        assert f"Rank 0 cannot listen on port {port}" in run_ranks(2, taken, init=False, store=None)[0]

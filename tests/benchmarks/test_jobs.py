from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from _jobs import Driver, Handler, JobError, Message, Place, bursts


def adding(place: Place) -> Handler:
    def handler(order: Message) -> Message:
        return {"sum": order["number"] + place.rank, "size": place.size, "rank": os.environ["RANK"]}

    return handler


def test_ranks_answer_orders() -> None:
    with Driver() as driver:
        first, second = driver.fork("first", 2, adding), driver.fork("second", 3, adding)
        for job, size in ((first, 2), (second, 3), (first, 2)):
            answers = job.ask({"number": 10})
            assert answers == [{"sum": 10 + rank, "size": size, "rank": str(rank)} for rank in range(size)]


def test_a_burst_counts_the_calls_of_the_slowest_rank() -> None:
    def setup(place: Place) -> Handler:
        calls: list[int] = []
        answer = bursts(lambda case: {"run": lambda: calls.append(place.rank)}, lambda: calls.append(-1))

        def handler(order: Message) -> Message:
            found = answer(order)
            return found | ({"seconds": 2.0 + place.rank, "calls": calls} if "burst" in order else {})

        return handler

    with Driver() as driver:
        job = driver.fork("job", 2, setup)
        assert job.ask({"prepare": {}}) == [{"contenders": ["run"]}] * 2
        assert job.burst("run", calls=3, warm=2) == 3.0
        [_, second] = job.ask({"burst": "run", "calls": 1, "warm": 0})
        assert second["calls"] == [1, 1, -1, 1, 1, 1, -1, 1]


def test_a_rank_that_fails_is_told_with_its_traceback() -> None:
    def setup(place: Place) -> Handler:
        def handler(order: Message) -> Message:
            if place.rank == 1:
                raise ValueError("too many grapes")
            return {}

        return handler

    with Driver() as driver:
        job = driver.fork("picking", 2, setup)
        with pytest.raises(JobError, match="rank 1 of picking failed: ValueError: too many grapes") as caught:
            job.ask({})
        assert "Traceback" in str(caught.value)


def test_a_rank_that_ends_is_told() -> None:
    def setup(place: Place) -> Handler:
        return lambda order: os._exit(3)

    with Driver() as driver, pytest.raises(JobError, match="rank 0 of quiet ended"):
        driver.fork("quiet", 1, setup).ask({})


def test_a_failed_set_up_leaves_no_rank_behind() -> None:
    def setup(place: Place) -> Handler:
        if place.rank == 0:
            raise RuntimeError("no such engine")
        return adding(place)

    with Driver() as driver:
        with pytest.raises(JobError, match="no such engine"):
            driver.fork("broken", 2, setup)
        assert driver.jobs == []  # and the fixture of all tests looks for child processes


def test_ranks_started_by_a_command(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("from _jobs import serve\nserve(lambda: lambda order: {'got': order}, rank=0)\n")
    path = str(Path(__file__).parents[2] / "benchmarks")
    with Driver() as driver:
        job = driver.command("command", 1, ["env", f"PYTHONPATH={path}", sys.executable, str(script)])
        assert job.ask({"number": 1}) == [{"got": {"number": 1}}]

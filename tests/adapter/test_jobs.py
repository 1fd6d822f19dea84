"""Whole jobs of an adapter without a framework: what the supervisor says of them, and that they end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch.conftest import Bench, Launched

from hora.core.rundir import RunDirectory

HEAD = """
from hora.adapter import process_sets
from hora.adapter.agreement import agree
from hora.adapter.context import Context, caller, join, leave
from hora.adapter.current import Current
from hora.adapter.guard import Spec
from hora.adapter.objects import allgather_object
from hora.adapter.only import only as _only

current = Current("hora.stage")

class Set(process_sets.ProcessSet):
    current = current

class Everyone(process_sets.Everyone, Set):
    pass

class only(_only):
    current = current

def shutdown():
    leave(current)

context = join(current, Context, everyone=Everyone(), where=caller(0), leave_at_exit=shutdown)

def allreduce(*shape, name=None):
    place = agree(context, "allreduce", name, [Spec("float32", shape)], operation="sum")
    with context.waiting(place):
        context.exchange("allreduce", b"x" * 10)

allreduce(4)
"""


@pytest.fixture
def job(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def verdicts(ended: Launched) -> list[dict[str, object]]:
    path = RunDirectory.open(ended.run).verdicts
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_that_is_well(job: Bench) -> None:
    ended = job(
        HEAD
        + """
        for step in range(50):
            allreduce(4)
            allreduce(step)
        assert allgather_object(context, rank) == [0, 1, 2]
        if rank == 0:
            with only(0, reason="evaluation"):
                time.sleep(0.5)
        allreduce(4)
        assert not {"torch", "tensorflow", "jax", "keras"} & set(sys.modules)
        print("done", rank)
        """.replace("\n        ", "\n"),
        workers=3,
    )
    assert ended.code == 0, ended.err
    assert verdicts(ended) == []
    about = RunDirectory.open(ended.run).about()
    assert about["world"]["size"] == 3
    assert about["guard"] == "on"


@pytest.mark.parametrize(("how", "victim"), [("raises", 0), ("exits", 1), ("killed", 0), ("killed", 1)])
def test_who_fails_is_named_and_nobody_hangs(job: Bench, victim: int, how: str) -> None:
    act = {
        "raises": "raise RuntimeError('on purpose')",
        "killed": "os.kill(os.getpid(), signal.SIGKILL)",
        "exits": "sys.exit(3)",
    }[how]
    ended = job(HEAD + f"if rank == {victim}:\n    {act}\nallreduce(5)\n", workers=3)
    assert ended.code == {"raises": 1, "killed": 137, "exits": 3}[how], ended.err
    assert ended.seconds < 10
    assert f"rank {victim}" in ended.err.lower()
    if how == "raises":
        assert "on purpose" in ended.err


def test_what_differs_is_a_verdict(job: Bench) -> None:
    ended = job(HEAD + "allreduce(5 + (rank == 1), name='w')\n", workers=3)
    assert ended.code != 0
    [found] = verdicts(ended)
    assert found["kind"] == "mismatched-calls"
    assert "The shape differs: (5,) and (6,)" in str(found["text"])
    assert "allreduce 'w' float32 (6,) sum at " in str(found["text"])
    assert found["ranks"] == [1]


def test_who_leaves_early_is_a_verdict(job: Bench) -> None:
    ended = job(HEAD + "if rank != 0:\n    allreduce(4)\n", workers=2)
    assert ended.code != 0
    assert [found["kind"] for found in verdicts(ended)] == ["subset-call"]
    assert ended.seconds < 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named(job: Bench, victim: int) -> None:
    job.environ |= {"HORA_STALL_AFTER": "1", "HORA_STALL_ABORT": "3"}
    ended = job(
        HEAD + f"if rank == {victim}:\n    os.kill(os.getpid(), signal.SIGSTOP)\nallreduce(4)\n", workers=2
    )
    assert ended.code != 0
    assert ended.seconds < 10
    kinds = {str(found["kind"]): found for found in verdicts(ended)}
    assert "late-rank" in kinds, kinds
    assert kinds["late-rank"]["ranks"] == [victim]


def test_started_by_mpi_on_one_host(job: Bench) -> None:
    # As MPICH's daemon starts them: no store is told, and the ranks have one parent.
    script = job.folder / "mpi.py"
    script.write_text(
        "import os, sys\nrank = int(os.environ['PMI_RANK'])\n"
        + HEAD
        + "assert allgather_object(context, rank) == [0, 1]\nprint('done', rank)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=job.environ
            | {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    began = time.monotonic()
    assert [rank.communicate(timeout=20)[0].split()[-1:] for rank in ranks] == [["0"], ["1"]]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert time.monotonic() - began < 10

"""The supervisor of elastic jobs: whom it puts into which world, and when it gives up.

The workers here speak to it as ``hora.torch.elastic`` does, without torch, so that they start at once.
"""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest
from tests.launch.conftest import Bench

WORKER = """
from pathlib import Path
from hora.core.elastic import control
from hora.core.settings import load

settings = load()
worker, link = settings.worker, control(settings)
folder = Path(os.environ["TEST_FOLDER"])
commits = 0

def join(prepared):
    member = link.join(settings, prepared=prepared, commits=commits, repeats=1 if commits else 0)
    opened = ("store_fd", "guard_fd", "guard_board") if member else ()
    for fd in filter(None, (getattr(member.settings, name) for name in opened)):
        os.close(fd)
    return member

def wait(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def tell(name):
    (folder / name).touch()

def train(body):
    global commits
    member = join(False)
    if member is None:
        member = join(True)
    while True:
        place = member.place
        print("world", member.number, "rank", place.rank, "of", place.size, flush=True)
        link.tell("running", number=member.number)
        body(member.number, place.rank, place.size)
        if link.reset_due() is None and not link.updated and link.finish():
            print("finished", flush=True)
            return
        member = join(True)

def commit(number):
    global commits
    commits += 1
    link.tell("commit", number=number, commits=commits)

def until_reset():
    assert link.reset_due(20) is not None

def until_updated():
    while not link.updated:
        time.sleep(0.01)
"""


class Elastic:
    """Runs scripts of such workers."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.environ["TEST_FOLDER"] = str(bench.folder)

    def __call__(self, body: str, *options: str) -> Any:
        import textwrap

        path = self.bench.script("", "job.py")
        path.write_text(path.read_text() + textwrap.dedent(WORKER) + textwrap.dedent(body))
        return self.bench.run(*options, str(path))

    def worlds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.bench.run_dir / "worlds.jsonl").read_text().splitlines()]

    def workers(self) -> list[list[int]]:
        return [world["workers"] for world in self.worlds()]


@pytest.fixture
def elastic(bench: Bench) -> Elastic:
    return Elastic(bench)


DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_in_their_order_and_the_replacement_is_taken_in(
    elastic: Elastic, victim: int
) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            if number == 0:
                commit(number)
                if worker == {victim}:
                    {DIE}
                until_reset()
            elif size == 2:
                until_updated()
        train(body)
        """,
        *("--min-workers", "1", "-n", "3"),
    )
    assert ended.code == 0, ended.err
    survivors = [worker for worker in range(3) if worker != victim]
    assert elastic.workers() == [[0, 1, 2], survivors, [*survivors, 3]]
    assert ended.out.count("finished") == 3
    line = next(line for line in ended.err.splitlines() if "go on from" in line)
    assert line == (
        f"hora: worker {victim} (rank {victim}) has failed: SIGKILL (killed from outside), exit code 137; "
        "2 workers go on from commit 1, 1 step is repeated"
    )


def test_several_die_at_once_and_again_while_the_others_meet(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            if number == 0:
                commit(number)
                if worker in (0, 2):
                    {DIE}
                until_reset()
                if worker == 1:  # on its way to the next world
                    {DIE}
        train(body)
        """,
        *("--min-workers", "1", "-n", "4"),
    )
    assert ended.code == 0, ended.err
    worlds = elastic.workers()
    assert worlds[0] == [0, 1, 2, 3]
    assert worlds[1][0] == 3
    assert elastic.worlds()[1]["commits"] == 1


def test_without_enough_workers_it_waits_for_replacements(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            if number == 0:
                commit(number)
                if worker == 0:
                    {DIE}
                until_reset()
        train(body)
        """,
        *("--min-workers", "2", "-n", "2"),
    )
    assert ended.code == 0, ended.err
    assert elastic.workers() == [[0, 1], [1, 2]]


def test_gives_up_when_too_few_workers_come(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            commit(number)
            if worker == 0:
                {DIE}
            until_reset()
        if worker > 1:
            time.sleep(60)
        train(body)
        """,
        *("--min-workers", "2", "-n", "2", "--elastic-timeout", "4"),
    )
    assert ended.code == 1
    assert "1 worker of the 2 that --min-workers asks for came within 4 s" in ended.err
    assert ended.seconds < 25


def test_an_exception_of_the_script_again_and_again_fails_the_job_with_its_report(elastic: Elastic) -> None:
    ended = elastic(
        """
        def body(number, rank, size):
            if rank == size - 1:
                raise ValueError("bad sample")
            until_reset()
        train(body)
        """,
        *("--min-workers", "1", "-n", "2", "--cooldown", "0.01", "0.02"),
    )
    assert ended.code == 1
    assert "given up: 3 failures without a commit in between" in ended.err
    assert "rank 1 of 2 failed" in ended.err
    assert ended.err.count("ValueError: bad sample") == 1
    assert "job.py" in ended.err


def test_a_commit_in_between_is_progress(elastic: Elastic) -> None:
    ended = elastic(
        """
        def body(number, rank, size):
            commit(number)
            if number < 5 and rank == size - 1:
                raise ValueError("bad sample")
            if number < 5:
                until_reset()
        train(body)
        """,
        *("--min-workers", "2", "-n", "2"),
    )
    assert ended.code == 0, ended.err
    assert len(elastic.workers()) == 6


def test_reset_limit(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            commit(number)
            if rank == size - 1:
                {DIE}
            until_reset()
        train(body)
        """,
        *("--min-workers", "2", "-n", "2", "--reset-limit", "2"),
    )
    assert ended.code == 1
    assert "given up after 2 resets" in ended.err
    assert len(elastic.workers()) == 3


def test_a_script_that_knows_nothing_of_it_runs_once(elastic: Elastic) -> None:
    ended = elastic.bench.run("--min-workers", "1", "-n", "2", str(elastic.bench.script("print('ran')")))
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0] ran", "[1] ran"]


def test_a_worker_that_dies_before_the_first_world_is_replaced(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        if worker == 1:
            {DIE}
        train(lambda number, rank, size: None)
        """,
        *("--min-workers", "2", "-n", "2"),
    )
    assert ended.code == 0, ended.err
    assert elastic.workers() == [[0, 2]]


def test_hosts_from_a_program_let_the_job_grow_and_shrink(elastic: Elastic) -> None:
    program = elastic.bench.folder / "hosts.sh"
    program.write_text(f"#!/bin/sh\ncat {elastic.bench.folder}/hosts\n")
    program.chmod(0o755)
    (elastic.bench.folder / "hosts").write_text("localhost:1\n")
    ended = elastic(
        """
        def body(number, rank, size):
            commit(number)
            if number == 0:
                (folder / "hosts").write_text("localhost:2\\n")
                until_updated()
            elif number == 1:
                if rank == 0:
                    (folder / "hosts").write_text("localhost:1\\n")
                until_updated()
        train(body)
        """,
        *("--min-workers", "1", "--max-workers", "3", "--hosts-from", str(program)),
    )
    assert ended.code == 0, ended.err
    assert elastic.workers() == [[0], [0, 1], [0]]


def test_interrupt_ends_all(elastic: Elastic) -> None:
    bench = elastic.bench
    bench.environ["TEST_MARK"] = "interrupt"
    path = bench.script("", "job.py")
    path.write_text(path.read_text() + WORKER + "train(lambda *_: (tell(f'in-{worker}'), time.sleep(60)))\n")
    process = bench.start("--min-workers", "1", "-n", "2", str(path))
    bench.wait_for(lambda: (bench.folder / "in-0").exists() and (bench.folder / "in-1").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert re.search(r"interrupted after \d+ s; 2 workers stopped", err)
    time.sleep(0)
    assert not bench.marked("interrupt")


@pytest.mark.parametrize(("victim", "code"), [(1, 0), (0, 137)])
def test_when_the_training_is_complete_the_job_needs_rank_0_alone(
    elastic: Elastic, victim: int, code: int
) -> None:
    ended = elastic(
        f"""
        def body(number, rank, size):
            if number == 0 and worker == 2:
                {DIE}
            if number == 0:
                until_reset()
        train(body)
        if worker == {victim}:
            {DIE}
        """,
        *("--min-workers", "1", "-n", "3"),
    )
    assert ended.code == code, ended.err
    if code:
        report = ended.err[ended.err.index(" failed on ") :]
        assert "rank 0 of 2" in ended.err
        assert f"rank-{victim}.log" in report


def test_a_kill_after_the_script_has_ended_counts_as_its_end(elastic: Elastic) -> None:
    ended = elastic(
        f"""
        import atexit
        atexit.unregister(link._end)
        atexit.register(lambda: {DIE})
        atexit.register(link._end)  # what is registered last runs first
        train(lambda number, rank, size: None)
        """,
        *("--min-workers", "1", "-n", "2"),
    )
    assert ended.code == 0, ended.err


def test_a_stopped_rank_is_killed_and_replaced(elastic: Elastic) -> None:
    ended = elastic(
        """
        def body(number, rank, size):
            if number > 0:
                return
            commit(number)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                link.tell("broken", number=number, reason="no answer")
                until_reset()
        train(body)
        """,
        *("--min-workers", "2", "-n", "2", "--stall-abort", "1"),
    )
    assert ended.code == 0, ended.err
    assert elastic.workers() == [[0, 1], [0, 2]]
    assert "worker 1 does not come to the next world, and is killed" in ended.err

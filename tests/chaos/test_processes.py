"""Whom a disturbance may reach, and what is seen of what a job has left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.chaos.processes import MARK, Rank, leftovers, living, segments, tcp_ports, unused

LAUNCHER = """
    import os, subprocess, sys, time
    def start(**variables):
        environ = {"HORA_CHAOS": "here"} | variables
        return subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE)
    ranks = [start(HORA_RANK="1"), start(HORA_RANK="0"), start(HORA_RANK="0", HORA_WORKER="7")]
    others = [start(), start(HORA_RANK="2", HORA_CHAOS="elsewhere")]
    print(*(one.pid for one in ranks), flush=True)
    input()
"""


@pytest.fixture
def launcher() -> Iterator[tuple[int, list[int]]]:
    """A process, and three of its five children, which are ranks."""
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, [int(word) for word in process.stdout.readline().split()]
        process.kill()  # its children read the end of their input


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.close()


def wait_for_marks(launcher: int, count: int) -> list[Rank]:
    while True:  # a child has its own environment only after exec; the test's time limit bounds it
        ranks = living(launcher, "here")
        if len(ranks) == count:
            return ranks
        close(ranks)


def test_ranks_of_this_job_alone(launcher: tuple[int, list[int]]) -> None:
    process, (one, zero, seven) = launcher
    ranks = wait_for_marks(process, 3)
    assert [(rank.pid, rank.worker) for rank in ranks] == [(zero, 0), (one, 1), (seven, 7)]
    assert living(os.getpid(), "here") == []
    assert ranks[0].signal(signal.SIGKILL)
    close(wait_for_marks(process, 2))
    assert ranks[0].ended
    assert not ranks[1].ended
    close(ranks)


def test_a_rank_that_has_ended_gets_no_signal() -> None:
    process = subprocess.Popen(["true"])
    rank = Rank(process.pid, 0, os.pidfd_open(process.pid))
    process.wait()
    assert rank.ended
    assert not rank.signal(signal.SIGKILL)
    rank.close()


def test_what_is_left_behind_is_found_by_its_mark_or_its_run(tmp_path: Path) -> None:
    reaper = [sys.executable, "-c", "input()", "_reaper.py", "job", "1", str(tmp_path / "run")]
    marked = [sys.executable, "-c", "input()", "orphan"]
    with (
        subprocess.Popen(reaper, stdin=subprocess.PIPE) as one,
        subprocess.Popen(marked, stdin=subprocess.PIPE, env={MARK: "the mark"}) as other,
    ):
        found: dict[int, str] = {}
        while len(found) < 2:  # both have come to exec; bounded by the test's time limit
            found = leftovers("the mark", tmp_path / "run")
        assert set(found) == {one.pid, other.pid}
        assert found[other.pid].endswith("input() orphan")
        assert leftovers("another", tmp_path) == {}
        for process in (one, other):
            process.kill()
    assert leftovers("the mark", tmp_path / "run") == {}


def test_shared_memory_that_nobody_uses() -> None:
    before = segments()
    mine, other = f"hora_test_{os.getpid()}_1", "hora_test_11_1"
    try:
        for name in (mine, other):
            Path("/dev/shm", name).touch()
        left = segments() - before
        assert {f"/dev/shm/{mine}", f"/dev/shm/{other}"} <= left
        assert unused(left, frozenset({os.getpid()})) == [f"/dev/shm/{mine}"]
        assert unused(left, frozenset()) == []
    finally:
        for name in (mine, other):
            Path("/dev/shm", name).unlink()


def test_the_tcp_ports_of_a_process() -> None:
    before = tcp_ports(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert tcp_ports(os.getpid()) - before == {server.getsockname()[1]}
    assert tcp_ports(2**22 + 1) == set()

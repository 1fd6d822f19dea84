"""A rank's half of the guard, against a supervisor that the test plays."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hora.core.errors import VerdictError
from hora.guard.board import Board, Phase
from hora.guard.call import Call
from hora.guard.reporter import Reporter
from hora.guard.verdict import Verdict


class Supervisor:
    """The other end of the link."""

    def __init__(self, *, strict: bool = False) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(5)
        fd = Board.make(2)
        self.board = Board(fd, 2)
        self.reporter = Reporter(theirs.detach(), fd, rank=0, size=2, strict=strict)
        os.close(fd)
        self._file = self.socket.makefile("rb")

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self._file.readline())
        return record

    def send(self, record: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(record).encode() + b"\n")

    def alarm(self, kind: str) -> None:
        verdict = Verdict(kind=kind, text="That is wrong.", advice="Mend it.")
        self.send({"kind": "alarm", "verdict": json.loads(verdict.line())})

    def close(self) -> None:
        self._file.close()
        self.socket.close()
        self.reporter.close()
        self.board.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor()
    yield made
    made.close()


def enter(
    reporter: Reporter, key: str, *, set_id: int = 0, members: tuple[int, ...] = (0, 1)
) -> tuple[int, int]:
    call = Call({"collective": key}, key, "train.py:3")
    return reporter.enter(key, lambda: call, set_id=set_id, members=members)


def answer(supervisor: Supervisor) -> list[dict[str, Any]]:
    """Play a supervisor that finds nothing wrong, up to and with the next check."""
    records = []
    while True:
        records.append(supervisor.read())
        if records[-1]["kind"] == "check":
            supervisor.send({"kind": "clear", "set": records[-1]["set"], "number": records[-1]["number"]})
            return records


def test_a_new_call_waits_for_the_supervisor_and_a_known_one_does_not(supervisor: Supervisor) -> None:
    seen: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: seen.extend(answer(supervisor)))
    thread.start()
    assert enter(supervisor.reporter, "allreduce") == (0, 1)
    thread.join()
    assert [record["kind"] for record in seen] == ["call", "check"]
    assert seen[0]["where"] == "train.py:3"
    assert enter(supervisor.reporter, "allreduce") == (0, 2)  # nobody answers: it must not ask
    assert [entry.number for entry in supervisor.board.entries(0)] == [1, 2]


def test_strict_asks_every_time() -> None:
    supervisor = Supervisor(strict=True)
    seen: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: [seen.extend(answer(supervisor)) for _ in range(3)])
    thread.start()
    for _ in range(3):
        enter(supervisor.reporter, "allreduce")
    thread.join()
    assert [record["kind"] for record in seen] == ["call", "check", "check", "check"]
    supervisor.close()


def test_a_process_set_is_introduced_and_counts_by_itself(supervisor: Supervisor) -> None:
    seen: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: [seen.extend(answer(supervisor)) for _ in range(2)])
    thread.start()
    assert enter(supervisor.reporter, "allreduce") == (0, 1)
    assert enter(supervisor.reporter, "gather", set_id=4) == (4, 1)
    thread.join()
    assert {"kind": "set", "set": 4, "members": [0, 1]} in seen


def test_equal_sequences_have_equal_histories_and_others_do_not(supervisor: Supervisor) -> None:
    def history(keys: str) -> int:
        other = Supervisor()
        for key in keys:
            enter(other.reporter, key, members=(0,))
        found = other.board.entries(0)[-1].history
        other.close()
        return found

    assert history("aab") == history("aab")
    assert len({history(keys) for keys in ("aab", "aba", "baa", "ab", "aabb")}) == 5


def test_an_alarm_ends_the_wait_and_every_later_call(supervisor: Supervisor) -> None:
    told = threading.Event()
    supervisor.reporter.on_alarm.append(told.set)
    thread = threading.Thread(target=lambda: (supervisor.read(), supervisor.alarm("mismatched-calls")))
    thread.start()
    with pytest.raises(
        VerdictError, match=r"That is wrong\. Mend it\..*hora explain mismatched-calls"
    ) as caught:
        enter(supervisor.reporter, "allreduce")
    thread.join()
    assert told.wait(5)
    assert not caught.value.echo
    with pytest.raises(VerdictError):
        enter(supervisor.reporter, "allreduce")
    engine = RuntimeError("Connection closed by peer")
    assert isinstance(supervisor.reporter.explain(engine), VerdictError)


def test_a_rank_that_failed_elsewhere_is_an_echo_here(supervisor: Supervisor) -> None:
    supervisor.alarm("rank-failed")
    error = supervisor.reporter.explain(RuntimeError("Connection closed by peer"))
    assert isinstance(error, VerdictError)
    assert error.echo


@pytest.mark.alone
def test_without_a_supervisor_everything_goes_on(supervisor: Supervisor) -> None:
    supervisor.socket.shutdown(socket.SHUT_RDWR)
    assert enter(supervisor.reporter, "allreduce") == (0, 1)
    engine = RuntimeError("Connection closed by peer")
    began = time.monotonic()
    assert supervisor.reporter.explain(engine) is engine
    assert time.monotonic() - began < 1
    supervisor.reporter.send({"kind": "anything"})


def test_waiting_is_shown_and_added_up(supervisor: Supervisor) -> None:
    place = enter(supervisor.reporter, "allreduce", members=(0,))
    began = supervisor.reporter.wait_begins(place)
    head = supervisor.board.head(0)
    assert (head.phase, head.set_id, head.number, head.since) == (Phase.WAITING, 0, 1, began)
    supervisor.reporter.wait_ends(place, began - 0.02)
    assert supervisor.board.head(0).phase == Phase.RUNNING
    assert supervisor.reporter.waited >= 0.02


def test_a_collective_in_work_of_its_own_is_refused(supervisor: Supervisor) -> None:
    with supervisor.reporter.alone("evaluation"):
        assert supervisor.read() == {"kind": "only", "reason": "evaluation"}
        assert supervisor.board.head(0).phase == Phase.ALONE
        with pytest.raises(VerdictError, match=r"allreduce at train\.py:3 inside hora\.only"):
            enter(supervisor.reporter, "allreduce")
    assert supervisor.board.head(0).phase == Phase.RUNNING


def test_work_of_its_own_is_no_part_of_its_steps(supervisor: Supervisor) -> None:
    began = time.monotonic()
    with supervisor.reporter.alone("evaluation"):
        entered = time.monotonic()
        with supervisor.reporter.alone("inside of it"):
            assert supervisor.reporter.is_alone
        time.sleep(0.02)
        left = time.monotonic()
    assert not supervisor.reporter.is_alone
    assert left - entered <= supervisor.reporter.waited <= time.monotonic() - began


def test_a_forked_child_reports_nothing(supervisor: Supervisor) -> None:
    pid = os.fork()
    if pid == 0:
        place = enter(supervisor.reporter, "allreduce")
        os._exit(0 if place == (0, 1) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert supervisor.board.entries(0) == []
    supervisor.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        supervisor.socket.recv(1)

"""The judge, over boards and records that no real rank has written."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guard.stage import Stage

from hora.guard.board import RING, Phase
from hora.guard.verdict import Verdict

SIZES = (2, 3, 64)


@pytest.mark.parametrize("size", SIZES)
def test_equal_calls_are_cleared_once_all_have_come(size: int) -> None:
    stage = Stage(size)
    for rank in range(size - 1):
        stage.call(rank)
    stage.look()
    assert stage.cleared == []
    stage.call(size - 1)
    stage.look()
    assert sorted(stage.cleared) == list(range(size))
    assert stage.desk.verdicts == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("collective", "broadcast", "The collective differs: allreduce and broadcast"),
        ("dtype", "float64", "The dtype differs: float32 and float64"),
        ("shape", [[4, 1]], "The shape differs: (3,) and (4, 1)"),
        ("operation", "max", "The operation differs: sum and max"),
        ("root", 1, "The root differs: none and 1"),
    ],
)
def test_a_call_that_differs_is_named_with_both_sites_and_what_differs(
    size: int, field: str, value: Any, words: str
) -> None:
    stage = Stage(size)
    for rank in range(size - 1):
        stage.call(rank)
    stage.call(size - 1, where="train.py:20", **{field: value})
    # The first call was at train.py:10 on the others, and only there: no line is extra to the last rank's.
    stage.look()
    verdict = stage.verdict
    assert verdict.kind == "mismatched-calls"
    assert words in verdict.text
    assert "train.py:10" in verdict.text
    assert "train.py:20" in verdict.text
    assert list(verdict.ranks) == ([size - 1] if size > 2 else [0, 1])
    assert verdict.where == ("train.py:20" if size > 2 else "train.py:10")
    assert verdict.hosts == list(dict.fromkeys(f"host{rank % 2}" for rank in verdict.ranks))
    assert stage.cleared == []


def test_a_call_whose_description_is_on_its_way_is_no_difference() -> None:
    stage = Stage(3)
    for rank in range(3):
        stage.call(rank)  # all on the board
    for rank in (2, 0, 1):
        assert stage.cleared == []
        stage.deliver(rank)
        stage.judge.tick()
    assert sorted(stage.cleared) == [0, 1, 2]
    assert stage.desk.verdicts == []


def test_a_rank_that_cannot_be_heard_keeps_nobody_waiting_for_ever() -> None:
    stage = Stage(2)
    stage.call(0)
    stage.call(1)
    stage.deliver(0)
    stage.judge.unheard_of(1)
    stage.judge.tick()
    assert stage.cleared == [0]


def test_a_rank_that_asks_late_is_cleared_although_the_others_have_gone_on() -> None:
    stage = Stage(2)
    for rank in range(2):
        stage.call(rank, "first")
    stage.look()
    stage.call(0, "first")  # known to rank 0, but at another line, so new to rank 1
    stage.call(1, "first", where="train.py:11")
    for _ in range(RING + 5):
        stage.call(0, "first")
    stage.look()
    assert stage.cleared.count(1) == 2
    assert stage.desk.verdicts == []


def test_known_calls_in_another_order_are_found_by_their_histories() -> None:
    stage = Stage(4)
    for name, rank in itertools.product(("a", "b"), range(4)):
        stage.call(rank, name, shape=[[len(name), ord(name)]])
    stage.look()
    for step, rank in itertools.product(range(20), range(4)):
        names = ("b", "a") if step == 12 and rank == 2 else ("a", "b")
        for name in names:
            stage.call(rank, name, shape=[[1, ord(name)]])
    stage.look()
    assert stage.verdict.kind == "mismatched-calls"
    assert list(stage.verdict.ranks) == [2]
    assert stage.verdict.call == "allreduce 'b'"  # the first of the two that came at the wrong place


def test_a_rank_that_ended_well_is_named_when_others_wait_for_it() -> None:
    stage = Stage(3)
    for rank in range(3):
        stage.call(rank, "loss")
    stage.look()
    for rank in (0, 2):
        stage.call(rank, "end", where="train.py:50", collective="barrier")
    stage.judge.ended(1, well=True)
    stage.look()
    verdict = stage.verdict
    assert verdict.kind == "subset-call"
    assert list(verdict.ranks) == [0, 2]
    assert verdict.where == "train.py:50"
    assert "Rank 1 has ended, with exit code 0, after allreduce 'loss' at train.py:10" in verdict.text


def test_a_verdict_waits_a_moment_for_those_who_tell_which_rank_is_odd() -> None:
    stage = Stage(5)
    now = time.monotonic()
    stage.call(3, shape=[[8]])
    stage.call(0)
    stage.look(now=now)
    assert stage.desk.verdicts == []
    stage.call(1)
    stage.call(2)
    stage.look(now=now + 0.2)
    assert stage.desk.verdicts == []
    stage.look(now=now + 0.5)  # rank 4 does not come
    assert list(stage.verdict.ranks) == [3]


FILE = (1, 40, "")
LOOP = (10, 20, "for batch in loader")


@pytest.mark.parametrize(
    ("one", "other", "extra"),
    [
        ((15, [FILE, LOOP]), (22, [FILE]), 0),  # the other has made fewer steps
        ((15, [FILE, LOOP, (14, 16, "if bad")]), (18, [FILE, LOOP]), 0),
        ((18, [FILE, LOOP, (17, 19, "if bad")]), (12, [FILE, LOOP]), 0),  # which is in the next step
        ((5, [FILE]), (15, [FILE, LOOP]), None),
        ((15, [FILE, (14, 18, "if a")]), (17, [FILE, (14, 18, "if a")]), None),  # if and else
        ((15, [(14, 18, "")]), (22, [FILE]), None),  # in different functions
    ],
)
def test_a_line_in_a_block_that_the_other_ranks_left_out_is_extra(
    one: tuple[int, list[Any]], other: tuple[int, list[Any]], extra: int | None
) -> None:
    stage = Stage(2)
    for rank, (line, blocks) in enumerate((one, other)):
        stage.call(
            rank, where=f"train.py:{line}", name=f"call {rank}", blocks=blocks, collective=f"kind {rank}"
        )
    stage.look()
    if extra is None:
        assert stage.verdict.kind == "mismatched-calls"
    else:
        assert (stage.verdict.kind, list(stage.verdict.ranks)) == ("subset-call", [extra])
        assert f"`{one[1][-1][2]}` (train.py:{one[1][-1][0]})" in stage.verdict.text


def test_a_rank_that_raised_has_not_just_left() -> None:
    stage = Stage(2)
    stage.call(0)
    stage.call(1)
    stage.look()
    stage.slots[1].phase(Phase.ABSENT, 0, 1, time.monotonic())  # the board is quicker than what it said
    stage.call(0)
    stage.look(times=1)
    stage.judge.failed(1, error="ValueError", message="no", traceback="", where="train.py:12")
    stage.look()
    assert stage.verdict.kind == "rank-failed"


def test_a_rank_that_has_shut_down_may_still_come_to_the_next_init() -> None:
    stage = Stage(3)
    for rank in range(3):
        stage.call(rank, "init", collective="init")
    stage.look()
    for rank in (0, 2):  # these two are back already
        stage.call(rank, "init", collective="init", where="train.py:90")
    stage.slots[1].phase(Phase.ABSENT, 0, 1, time.monotonic())
    stage.look(times=10)
    assert stage.desk.verdicts == []
    stage.judge.ended(1, well=True)
    stage.look()
    assert stage.verdict.kind == "subset-call"


def test_ranks_that_end_after_their_last_call_leave_nobody_behind() -> None:
    stage = Stage(3)
    for rank in range(3):
        stage.call(rank, "loss")
    stage.judge.ended(1, well=True)  # its peers have not yet noted that the collective is over
    stage.look()
    assert stage.desk.verdicts == []


@pytest.mark.parametrize("size", SIZES)
def test_a_call_under_a_condition_on_the_rank_is_a_call_of_a_subset(size: int) -> None:
    stage = Stage(size)
    stage.call(0, "log", where="train.py:30", condition="`if rank == 0` (train.py:29)", shape=[[1]])
    for rank in range(1, size):
        stage.call(rank)
    stage.look()
    verdict = stage.verdict
    assert verdict.kind == "subset-call"
    assert list(verdict.ranks) == [0]
    assert "under a condition on the rank: `if rank == 0` (train.py:29)" in verdict.text
    assert verdict.where == "train.py:30"


def test_a_line_that_the_others_never_came_to_is_a_call_of_a_subset() -> None:
    stage = Stage(4)
    for rank in range(4):
        stage.call(rank)
    stage.look()
    stage.call(3, "metric", where="metrics.py:7", shape=[[1]])
    for rank in range(3):
        stage.call(rank)
    stage.look()
    verdict = stage.verdict
    assert verdict.kind == "subset-call"
    assert list(verdict.ranks) == [3]
    assert verdict.where == "metrics.py:7"


def test_ranks_that_wait_for_each_other_in_two_process_sets() -> None:
    stage = Stage(3)
    stage.members |= {1: [0, 1], 2: [0, 1, 2]}
    for rank, set_id in ((0, 1), (1, 2), (2, 2)):
        stage.call(rank, f"in {set_id}", where=f"train.py:{set_id}", set_id=set_id)
    stage.look()
    verdict = stage.verdict
    assert verdict.kind == "mismatched-calls"
    assert "train.py:1" in verdict.text
    assert "train.py:2" in verdict.text


def test_a_running_rank_may_still_come_so_there_is_no_circle() -> None:
    stage = Stage(3)
    stage.members |= {1: [0, 1], 2: [1, 2]}
    stage.call(0, "in 1", set_id=1)
    stage.call(2, "in 2", set_id=2)
    stage.look(times=5)
    assert stage.desk.verdicts == []


def _stack(rank: int) -> str:
    return (
        f"Thread 0x00{rank} (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
        f"Current thread 0x0{rank} (most recent call first):\n"
        '  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 88 in sort\n'
        f'  File "/home/me/train{rank}.py", line 17 in prepare\n'
        f'  File "/home/me/train{rank}.py", line 40 in <module>\n'
        '  File "/venv/lib/python3.11/site-packages/hora/launch/_worker.py", line 150 in <module>\n'
    )


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("site-packages/torch/utils/data/dataloader.py", "It waits for a worker of its DataLoader"),
        ("site-packages/torch/autograd/graph.py", "If its model is wrapped in DistributedDataParallel"),
        ("site-packages/numpy/core.py", "If it is slow by design"),
    ],
)
def test_library_code_that_a_late_rank_is_in_gives_a_hint(file: str, words: str) -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    stage.call(1, since=now)
    stage.look(now=now + 31)
    stage.judge.stack(0, _stack(0).replace("site-packages/numpy/core.py", file))
    stage.look(now=now + 31.1)
    [(verdict, _)] = stage.desk.verdicts
    assert verdict.advice.startswith(words)


def test_an_import_is_given_ten_seconds_and_other_work_is_told() -> None:
    importing = _stack(0).replace("/venv/lib/python3.11/site-packages/numpy/core.py", "<frozen importlib>")
    for stack, told in ((importing, 10), (_stack(0), 4)):
        stage = Stage(2, stall_after=1.0)
        now = time.monotonic()
        stage.call(1, since=now)
        for waited in range(1, 12):
            stage.look(now=now + waited)
            stage.judge.stack(0, stack if waited > 3 else importing)
            stage.look(now=now + waited + 0.1)
            assert len(stage.desk.verdicts) == (waited >= told)


@pytest.mark.parametrize("size", SIZES)
def test_a_late_rank_is_named_with_its_stack(size: int) -> None:
    stage = Stage(size, stall_after=30.0)
    now = time.monotonic()
    for rank in range(1, size):
        stage.call(rank, since=now)
    stage.look(now=now + 29)
    assert stage.desk.asked == []
    stage.look(now=now + 31)
    assert stage.desk.asked == [0]
    assert stage.desk.verdicts == []
    stage.judge.stack(0, _stack(0))
    stage.look(now=now + 31.1)
    [(verdict, stop)] = stage.desk.verdicts
    assert not stop
    assert verdict.kind == "late-rank"
    assert list(verdict.ranks) == [0]
    assert verdict.where == "/home/me/train0.py:17"
    assert "sort (/venv/lib/python3.11/site-packages/numpy/core.py:88)" in verdict.text
    assert "prepare (/home/me/train0.py:17)" in verdict.text
    assert "threading" not in verdict.text
    assert "allreduce 'loss' at train.py:10" in verdict.text
    stage.look(now=now + 200)
    assert len(stage.desk.verdicts) == 1


def test_a_stopped_process_of_a_late_rank_is_named() -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    stage.call(1, since=now)
    stage.desk.stopped[0] = {77: "loader worker (pid 77)", 78: "loader worker (pid 78)"}
    stage.look(now=now + 31)
    stage.judge.stack(0, _stack(0))
    stage.look(now=now + 31)
    [(verdict, _)] = stage.desk.verdicts
    assert "Its loader worker (pid 77) and loader worker (pid 78) are stopped (SIGSTOP)." in verdict.text
    assert verdict.advice == "Find out what has stopped it; `kill -CONT 77 78` lets it go on."


def test_a_rank_that_a_signal_has_stopped_is_named_after_five_seconds() -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    stage.call(1, since=now)
    stage.look(now=now + 6)
    assert stage.desk.verdicts == []  # it may come by itself
    stage.desk.halted.add(0)
    stage.look(now=now + 6.1)
    stage.judge.stack(0, "it is stopped (SIGSTOP), so its stack cannot be taken")
    stage.look(now=now + 6.2)
    [(verdict, stop)] = stage.desk.verdicts
    assert verdict.ranks == [0]
    assert not stop
    assert "it is stopped (SIGSTOP)" in verdict.text


def test_a_stack_that_does_not_come_holds_the_verdict_up_for_a_second() -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    stage.call(0, since=now)
    stage.look(now=now + 30.5)
    stage.look(now=now + 31.4)
    assert stage.desk.verdicts == []
    stage.look(now=now + 31.6)
    assert "its stack could not be taken" in stage.desk.verdicts[0][0].text


def test_work_declared_as_one_ranks_own_keeps_nobody_waiting_in_vain() -> None:
    from hora.guard.board import Phase

    stage = Stage(2, stall_after=1.0, stall_abort=5.0)
    now = time.monotonic()
    stage.call(0, since=now)
    stage.judge.receive(1, {"kind": "only", "reason": "evaluation"})
    stage.slots[1].phase(Phase.ALONE, 0, 0, now)
    stage.look(now=now + 1000)
    assert stage.desk.verdicts == []
    stage.slots[1].phase(Phase.RUNNING, 0, 0, now)
    stage.look(now=now + 1000.9)  # from here on it is as late as any other
    assert stage.desk.verdicts == []
    stage.look(now=now + 1001.1)
    stage.judge.stack(1, _stack(1))
    stage.look(now=now + 1001.1)
    [(verdict, stop)] = stage.desk.verdicts
    assert (verdict.kind, stop) == ("late-rank", False)


@pytest.mark.parametrize(
    ("options", "limit", "name"),
    [
        ({"stall_abort": 60.0}, 60.0, "--stall-abort"),
        ({"timeout": 40.0}, 40.0, "HORA_TIMEOUT"),
        ({"stall_abort": 60.0, "timeout": 40.0}, 60.0, "--stall-abort"),
        ({"stall_abort": 10.0}, 10.0, "--stall-abort"),
    ],
)
def test_the_job_is_stopped_when_the_wait_is_too_long(
    options: dict[str, float], limit: float, name: str
) -> None:
    stage = Stage(2, **{"stall_after": 30.0} | options)
    now = float(int(time.monotonic()))  # whole seconds, so that sums and differences are exact
    stage.call(1, since=now)
    early = limit > 30
    if early:
        stage.look(now=now + 31)
        stage.judge.stack(0, _stack(5))
        stage.look(now=now + 31)
        assert [stop for _, stop in stage.desk.verdicts] == [False]
    stage.look(now=now + limit - 1)
    assert len(stage.desk.verdicts) == early
    stage.look(now=now + limit)
    stage.judge.stack(0, _stack(7))  # taken anew: the rank has gone on meanwhile
    stage.look(now=now + limit)
    verdict, stop = stage.desk.verdicts[-1]
    assert stop
    assert verdict.kind == "late-rank"
    assert f"The job is stopped after {limit:g} s ({name})" in verdict.text
    assert verdict.where == "/home/me/train7.py:17"
    assert stage.desk.asked == [0] * (1 + early)
    told = [(one.verdict.where, one.line) for one in stage.desk.earlier]
    line = f"Rank 0 still keeps the others waiting. The job is stopped after {limit:g} s ({name})."
    assert told == [("/home/me/train5.py:17", line)] * early


def test_a_collective_that_all_have_entered_and_none_leaves() -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    for _, rank in itertools.product(range(2), range(2)):
        stage.call(rank, since=now)
    stage.look(now=now + 31)
    stage.look(now=now + 33)  # the stacks did not come
    [(verdict, _)] = stage.desk.verdicts
    assert verdict.kind == "late-rank"
    assert "all its ranks have entered" in verdict.text


def test_one_that_is_stopped_inside_a_collective_is_named() -> None:
    stage = Stage(2, stall_after=30.0)
    now = time.monotonic()
    for rank in range(2):
        stage.call(rank, since=now)
    stage.look(now=now + 31)
    stage.judge.stack(0, "it waits")
    stage.judge.stack(1, "it is stopped (SIGSTOP), so its stack cannot be taken")
    stage.look(now=now + 31.1)
    [(verdict, _)] = stage.desk.verdicts
    assert (verdict.kind, list(verdict.ranks)) == ("late-rank", [1])
    assert "it is stopped (SIGSTOP)" in verdict.text


def test_a_failed_rank_is_told_with_its_traceback_and_step_once() -> None:
    stage = Stage(4)
    stage.slots[2].pace(17, 0.0, 0.0, 1.0)
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no\n'
    stage.judge.failed(2, error="ValueError", message="no\nmore", traceback=trace, where="train.py:3")
    stage.judge.failed(3, error="KeyError", message="'x'", traceback="", where=None)
    verdict = stage.verdict
    assert verdict.kind == "rank-failed"
    assert verdict.text == f"Rank 2 failed at train.py:3: ValueError: no\n{trace.rstrip()}"
    assert (list(verdict.ranks), verdict.where, verdict.step) == ([2], "train.py:3", 17)


def test_a_long_traceback_keeps_both_ends() -> None:
    stage = Stage(2)
    trace = "first\n" + "x" * 100_000 + "\nlast"
    stage.judge.failed(0, error="E", message="", traceback=trace, where=None)
    assert len(stage.verdict.text) < 7000
    assert "first" in stage.verdict.text
    assert stage.verdict.text.endswith("last")


def test_a_failure_after_unequal_calls_is_explained_by_them() -> None:
    stage = Stage(2)
    for rank in range(2):
        stage.call(rank, "a")
        stage.call(rank, "b", shape=[[9]])
    stage.look()
    stage.call(0, "a")
    stage.call(1, "b", shape=[[9]])  # both known, so nobody asked; the engine fails with a wrong size
    stage.judge.ended(1, well=False)
    stage.judge.failed(1, error="RuntimeError", message="op.preamble.length", traceback="", where=None)
    assert stage.verdict.kind == "mismatched-calls"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": None},
        {"kind": ["call"]},
        {"kind": "unheard of"},
        {"kind": "call"},
        {"kind": "call", "id": "x", "signature": {}, "text": ""},
        {"kind": "call", "id": 1, "signature": [1], "text": ""},
        {"kind": "set", "set": 0, "members": [99]},
        {"kind": "set", "set": 1, "members": [-1]},
        {"kind": "set", "set": 1, "members": 3},
        {"kind": "set", "set": 1, "members": []},
        {"kind": "check", "set": float("inf"), "number": 1},
        {"kind": "check", "set": 5, "number": -3},
        {"kind": "check", "set": 2**70, "number": 2**70},
        {"kind": "only"},
    ],
    ids=json.dumps,
)
def test_broken_records_do_no_harm(record: dict[str, Any]) -> None:
    stage = Stage(2)
    stage.judge.receive(1, record)
    stage.look()
    for rank in range(2):
        stage.call(rank)
    stage.look()
    assert sorted(stage.cleared)[:2] == [0, 1]
    assert stage.desk.verdicts == []
    assert len(stage.desk.complaints) <= 1


@given(st.binary(min_size=128, max_size=4000))
def test_a_board_full_of_anything_does_no_harm(data: bytes) -> None:
    stage = Stage(2)
    stage.slots[1]._own[: len(data)] = data
    stage.call(0)
    stage.look(now=time.monotonic() + 1000)
    stage.look(now=time.monotonic() + 2000)
    assert all(isinstance(verdict, Verdict) for verdict, _ in stage.desk.verdicts)


@settings(deadline=None)
@given(data=st.data(), size=st.integers(2, 5), wrong=st.booleans())
def test_whatever_comes_first_the_verdict_is_the_same_and_given_once(
    data: st.DataObject, size: int, wrong: bool
) -> None:
    """Each rank makes four calls, each after the one before was cleared; one rank may make another third."""
    stage = Stage(size)
    made = [0] * size
    odd = data.draw(st.integers(0, size - 1)) if wrong else -1
    for _ in range(400):
        if stage.desk.verdicts or (all(count == 4 for count in made) and not any(stage.post)):
            break
        rank = data.draw(st.integers(0, size - 1))
        if stage.post[rank]:
            stage.judge.receive(rank, stage.post[rank].popleft())
        elif stage.cleared.count(rank) == made[rank] < 4:
            number = made[rank]
            shape = [[77 if rank == odd and number == 2 else number]]
            stage.call(rank, f"call {number}", where=f"train.py:{number}", shape=shape)
            made[rank] += 1
        if data.draw(st.booleans()):
            stage.judge.tick()
    else:
        return  # the draw left a rank out for too long
    stage.look(now=time.monotonic() + 1)
    if wrong:
        assert stage.verdict.kind == "mismatched-calls"
        assert max(stage.cleared.count(rank) for rank in range(size)) == 2
        assert "shape differs" in stage.verdict.text
    else:
        assert stage.desk.verdicts == []
        assert all(stage.cleared.count(rank) == 4 for rank in range(size))


def _work(size: int) -> float:
    """Seconds that the judge works for a job of a few calls, the last of which one rank never makes."""
    stage = Stage(size, stall_after=1.0, stall_abort=2.0)
    began = time.monotonic()
    spent = 0.0
    for number in range(4):
        for rank in range(size):
            if number < 3 or rank:
                stage.call(rank, f"call {number}", where=f"train.py:{number}", since=began)
        start = time.perf_counter()
        stage.look()
        spent += time.perf_counter() - start
    start = time.perf_counter()
    for now in (1.5, 2.6, 3.0, 4.1):
        stage.look(now=began + now)
        stage.judge.stack(0, _stack(0))
    spent += time.perf_counter() - start
    assert stage.desk.verdicts[-1][1]
    assert sorted(set(stage.cleared)) == list(range(size))
    return spent


@pytest.mark.alone
def test_the_work_for_a_hung_job_is_small_and_grows_linearly() -> None:
    small = min(_work(64) for _ in range(3))
    large = min(_work(1024) for _ in range(2))
    assert small < 1.0
    assert large < 16 * 4 * small

"""Matching by name, without sockets: who waits, what runs, what fails."""

from __future__ import annotations

from typing import Any

import pytest

from hora.adapter.negotiation.coordinator import fuse
from hora.adapter.negotiation.match import Answer, Ask, Fail, Joined, Run, SetChange, Table


def ask(kind: str = "allreduce", *shape: int, **changes: Any) -> Ask:
    shape = shape or (3,)
    defaults: dict[str, Any] = {"op": "sum"} if kind == "allreduce" else {}
    return Ask(kind=kind, tensors=(("float32", shape),), **{**defaults, **changes})


def asked(table: Table, name: str, asks: dict[int, Ask], set_id: int = 0) -> list[Answer]:
    """The answers to the last of several ranks that ask."""
    answers: list[Answer] = []
    for rank, one in asks.items():
        answers = table.ask(rank, (set_id, name), one)
    return answers


def test_an_operation_runs_when_the_last_rank_asks_whatever_else_happens() -> None:
    table = Table(3)
    assert table.ask(0, (0, "a"), ask()) == []
    assert table.ask(1, (0, "a"), ask()) == []
    (other,) = asked(table, "b", {2: ask(), 1: ask(), 0: ask()})
    assert isinstance(other, Run)
    assert other.key == (0, "b")
    (run,) = table.ask(2, (0, "a"), ask())
    assert isinstance(run, Run)
    assert run.members == (0, 1, 2)
    assert run.absent == frozenset()


def test_first_dimensions_are_told() -> None:
    table = Table(2)
    (run,) = asked(table, "g", {0: ask("allgather", 2, 5), 1: ask("allgather", 0, 5)})
    assert isinstance(run, Run)
    assert run.rows == [[2, 0]]
    (run,) = asked(table, "t", {0: ask("alltoall", 3, splits=(1, 2)), 1: ask("alltoall", 1, splits=(1, 0))})
    assert isinstance(run, Run)
    assert run.rows == [[1, 2], [1, 0]]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (ask(), ask("allreduce", 4), "Mismatched allreduce tensor shapes"),
        (ask("allreduce", 2, 3), ask("allreduce", 6), "Mismatched allreduce tensor shapes"),
        (ask(), ask(op="max"), "Mismatched allreduce reduce operations"),
        (ask(), ask(prescale=2.0), "Mismatched allreduce prescale or postscale factors"),
        (ask(), Ask("allreduce", "sum", tensors=(("int32", (3,)),)), "Mismatched data types"),
        (ask(), ask(device="GPU"), "Mismatched device selection"),
        (ask(), ask("broadcast"), "Mismatched collective operations"),
        (ask("broadcast", root=0), ask("broadcast", root=1), "Mismatched broadcast root ranks"),
        (ask("allgather", 2, 3), ask("allgather", 2, 4), "Mismatched allgather tensor shapes"),
        (ask(), Ask("allreduce", "sum", tensors=(("float32", (3,)),) * 2), "Mismatched number of tensors"),
    ],
)  # fmt: skip
def test_a_difference_fails_on_all_who_asked(one: Ask, other: Ask, text: str) -> None:
    (fail,) = asked(Table(2), "x", {0: one, 1: other})
    assert isinstance(fail, Fail)
    assert fail.ranks == (0, 1)
    assert text in fail.text
    assert "rank 0" in fail.text
    assert "rank 1" in fail.text
    assert not fail.echo


def test_joined_ranks_take_part_in_allreduce_alone() -> None:
    table = Table(3)
    assert table.ask(0, (0, "a"), ask()) == []
    assert table.ask(1, (0, "g"), ask("allgather")) == []
    answers = table.join(2)
    assert [type(answer) for answer in answers] == [Fail]  # the gather can never be run
    (run,) = table.ask(1, (0, "a"), ask())
    assert isinstance(run, Run)
    assert run.absent == frozenset({2})
    assert table.join(0) == []
    (joined,) = table.join(1)
    assert joined == Joined(last=1)
    assert table.ask(2, (0, "a"), ask()) == []  # joining is over


def test_a_rank_that_has_left_fails_what_needs_it_and_nothing_else() -> None:
    table = Table(3)
    asked(table, "add.0", {rank: Ask("add", ranks=(0, 1)) for rank in range(3)})
    assert table.ask(0, (0, "a"), ask()) == []
    (fail,) = table.leave(2, "rank 2 is gone")
    assert isinstance(fail, Fail)
    assert fail.ranks == (0,)
    assert fail.echo
    (later,) = table.ask(1, (0, "b"), ask())
    assert isinstance(later, Fail)
    (run,) = asked(table, "a", {0: ask(), 1: ask()}, set_id=1)
    assert isinstance(run, Run)
    assert run.members == (0, 1)


def test_process_sets_come_and_go_with_all_ranks() -> None:
    table = Table(2)
    (added,) = asked(table, "add.0", {rank: Ask("add", ranks=(0,)) for rank in range(2)})
    assert added == SetChange(key=(0, "add.0"), ranks=(0,))
    (run,) = table.ask(0, (1, "a"), ask())
    assert isinstance(run, Run)
    asked(table, "remove.0", {rank: Ask("remove", root=1) for rank in range(2)})
    (fail,) = table.ask(0, (1, "a"), ask())
    assert isinstance(fail, Fail)
    (fail,) = asked(table, "add.1", {rank: Ask("add", ranks=(rank,)) for rank in range(2)})
    assert isinstance(fail, Fail)


def test_overdue_operations_are_told_once_with_who_is_missing() -> None:
    now = 100.0
    table = Table(3, clock=lambda: now)
    table.ask(1, (0, "a"), ask())
    assert table.next_deadline(60.0) == 160.0
    assert table.overdue(60.0) == []
    now = 161.0
    assert table.overdue(60.0) == [("a", [0, 2])]
    assert table.overdue(60.0) == []
    assert table.next_deadline(60.0) is None
    assert table.abandon(120.0, "stalled") == []
    (fail,) = table.abandon(60.0, "stalled")
    assert isinstance(fail, Fail)
    assert fail.ranks == (1,)


def test_ready_operations_are_joined_up_to_a_limit_and_never_across_a_join() -> None:
    table = Table(1)
    runs = [
        answer
        for name in "abcd"
        for answer in table.ask(0, (0, name), ask("allreduce", 10))  # 80 bytes at most
    ]
    (big,) = table.ask(0, (0, "big"), ask("allreduce", 1000))
    (other,) = table.ask(0, (0, "o"), ask(op="max"))
    groups = fuse([*runs[:2], other, big, *runs[2:]], limit=240)
    names = [[run.key[1] for run in group] for group in groups if isinstance(group, list)]
    assert names == [["a", "b", "c"], ["o"], ["big"], ["d"]]
    cut = fuse([runs[0], Joined(last=0), runs[1]], limit=10**6)
    assert [type(group) for group in cut] == [list, Joined, list]

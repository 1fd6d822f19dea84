"""Gradients that are not finite, and parameters that do not move, as the judge hears of them."""

from __future__ import annotations

from typing import Any

from tests.guard.stage import Stage


def bad(stage: Stage, rank: int, step: int, *, order: int = 1, **fields: Any) -> None:
    record = {"kind": "not-finite", "key": "1", "members": list(range(stage.size)), "own": True, "step": step}
    record |= {"where": "t.py:3", "names": ["fc.bias"], "count": 3, "value": "nan", "loss": None}
    stage.post[rank].append(record | {"order": order} | fields)


def idle(
    stage: Stage, rank: int, *, silent: list[int], stuck: list[int] | None = None, step: int = 8
) -> None:
    record = {"kind": "idle", "key": "1", "members": list(range(stage.size)), "optimizer": "SGD"}
    record |= {"where": "t.py:3", "step": step, "trainable": 4, "silent": silent, "stuck": stuck or []}
    stage.post[rank].append(record | {"names": {str(index): f"p{index}" for index in range(4)}})


def passed(stage: Stage, step: int) -> None:
    for slot in stage.slots:
        slot.pace(step, 0.0, 0.0, 1.0)


def test_the_rank_the_step_and_the_parameter_are_named() -> None:
    stage = Stage(3)
    bad(stage, 2, 4, loss="nan")
    passed(stage, 3)
    stage.look()
    assert stage.desk.verdicts == []  # the others may report the same step
    passed(stage, 4)
    stage.look()
    [(verdict, stop)] = stage.desk.verdicts
    assert (verdict.kind, verdict.ranks, verdict.step, stop) == ("not-finite", [2], 4, False)
    assert "fc.bias and 2 more was not a number (NaN) on rank 2. The loss itself was" in verdict.text


def test_the_earliest_pass_is_at_fault_not_those_that_it_spread_to() -> None:
    stage = Stage(2)
    bad(stage, 0, 4, order=9)
    bad(stage, 1, 4, order=8)
    passed(stage, 4)
    stage.look()
    [(verdict, _)] = stage.desk.verdicts
    assert verdict.ranks == [1]


def test_where_only_the_average_is_seen_the_loss_tells_whose_it_was() -> None:
    stage = Stage(2)
    bad(stage, 0, 4, own=False)
    bad(stage, 1, 4, own=False, loss="inf")
    passed(stage, 4)
    stage.look()
    [(verdict, _)] = stage.desk.verdicts
    assert verdict.ranks == [1]


def test_it_is_told_once() -> None:
    stage = Stage(2)
    for step in (4, 5, 6):
        for rank in (0, 1):
            bad(stage, rank, step)
        passed(stage, step)
        stage.look()
    assert len(stage.desk.verdicts) == 1


def test_a_parameter_without_a_gradient_on_all_ranks_is_named() -> None:
    stage = Stage(2)
    idle(stage, 0, silent=[1, 2])
    stage.look()
    assert stage.desk.verdicts == []
    idle(stage, 1, silent=[2, 3])
    stage.look()
    [(verdict, _)] = stage.desk.verdicts
    assert (verdict.kind, verdict.ranks, verdict.where) == ("frozen-parameters", [0, 1], "t.py:3")
    assert verdict.text.startswith("p2 (1 of 4 trainable parameters) got no gradient in steps 1 to 8")


def test_parameters_unused_on_some_ranks_are_no_verdict() -> None:
    stage = Stage(2)
    idle(stage, 0, silent=[1])
    idle(stage, 1, silent=[2])
    stage.look()
    assert stage.desk.verdicts == []


def test_an_optimizer_of_nothing_that_is_used() -> None:
    stage = Stage(1)
    idle(stage, 0, silent=[0, 1, 2, 3], step=1)
    stage.look()
    [(verdict, _)] = stage.desk.verdicts
    assert "None of the 4 trainable parameters" in verdict.text
    assert "in step 1:" in verdict.text


def test_parameters_that_do_not_change() -> None:
    stage = Stage(1)
    idle(stage, 0, silent=[], stuck=[3])
    stage.look()
    [(verdict, _)] = stage.desk.verdicts
    assert "p3 (1 of 4 trainable parameters) did not change" in verdict.text


def left_out(stage: Stage, rank: int, names: list[str]) -> None:
    record = {"kind": "left-out", "key": "1", "members": list(range(stage.size)), "where": "t.py:3"}
    stage.post[rank].append(record | {"since": 2, "step": 4, "count": len(names), "names": names})


def test_parameters_in_no_optimizer_are_told_once_all_ranks_have_seen_them() -> None:
    stage = Stage(2)
    left_out(stage, 0, ["head.weight", "head.bias"])
    stage.look(now=1.0)
    assert stage.desk.verdicts == []
    left_out(stage, 1, ["head.weight", "head.bias"])
    stage.look(now=1.1)
    [(verdict, stop)] = stage.desk.verdicts
    assert (verdict.kind, verdict.ranks, verdict.where, stop) == (
        "frozen-parameters",
        [0, 1],
        "t.py:3",
        False,
    )
    assert verdict.text.startswith(
        "head.weight and head.bias have got gradients in steps 2 to 4, and no optim"
    )
    for rank in (0, 1):
        idle(stage, rank, silent=[2])  # the part that they replace
    stage.look(now=1.2)
    assert len(stage.desk.verdicts) == 1


def test_a_rank_alone_with_parameters_in_no_optimizer_is_named_after_a_moment() -> None:
    stage = Stage(2)
    left_out(stage, 1, ["head.bias"])
    stage.look(now=1.0)
    stage.look(now=2.1)
    [(verdict, _)] = stage.desk.verdicts
    assert verdict.ranks == [1]
    assert verdict.text.startswith("head.bias has got gradients")

"""Fingerprints that differ, and what the judge makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.guard.stage import Stage

from hora.guard.verdict import Verdict

NAMES = ["conv.weight", "conv.bias", "fc.weight"]
EQUAL = [11, 22, 33]


class Replicas:
    """One optimizer on all ranks of a stage."""

    def __init__(self, size: int, *, distributed: bool = True, **start: Any) -> None:
        self.stage = Stage(size)
        self.size = size
        self.distributed = distributed
        self.start = {"broadcast": True} | start

    def begin(self, **by_rank: Sequence[Any]) -> Replicas:
        """Each rank reports before its first step; ``by_rank`` holds what differs, by rank."""
        for rank in range(self.size):
            record = {
                "kind": "replica",
                "key": "1",
                "members": list(range(self.size)),
                "distributed": self.distributed,
                "changed": [],
                "seed": None,
                "restored": [],
                "names": NAMES,
                "optimizer": "SGD",
                "where": "train.py:5",
                "together": None,
                "stateful": False,
                "parameters": EQUAL,
                "state": [0, 0, 0],
                "rates": [{"lr": 0.1, "momentum": 0.9}],
            }
            self.send(rank, record | self.start, rank_values(by_rank, rank))
        return self

    def step(self, step: int, **by_rank: Sequence[Any]) -> Replicas:
        """Each rank reports after a step."""
        for rank in range(self.size):
            record = {
                "kind": "print",
                "key": "1",
                "step": step,
                "parameters": [step, *EQUAL[1:]],
                "gradients": [5, 6, 7],
                "state": [1, 2, 3],
                "rates": [{"lr": 0.1, "momentum": 0.9}],
                "written": [],
                "restored": [],
                "buffers": None,
            }
            self.send(rank, record, rank_values(by_rank, rank))
        return self

    def end(self, step: int, **by_rank: Sequence[Any]) -> Replicas:
        """Each rank makes its last report, and ends."""
        for rank in range(self.size):
            record = {"kind": "final", "key": "1", "step": step, "parameters": EQUAL, "buffers": {}}
            self.send(rank, record, rank_values(by_rank, rank))
        for rank in range(self.size):
            self.stage.judge.ended(rank, well=True)
        return self

    def send(self, rank: int, record: dict[str, Any], changed: dict[str, Any]) -> None:
        self.stage.post[rank].append(record | changed)
        self.stage.look(times=1)

    @property
    def verdicts(self) -> list[Verdict]:
        self.stage.look()
        assert self.stage.desk.complaints == []
        assert not any(stop for _, stop in self.stage.desk.verdicts)
        return [verdict for verdict, _ in self.stage.desk.verdicts]


def rank_values(by_rank: dict[str, Sequence[Any]], rank: int) -> dict[str, Any]:
    return {name: values[rank] for name, values in by_rank.items()}


def other(size: int, rank: int, usual: Any, odd: Any) -> list[Any]:
    """What each rank has, where one has something else."""
    return [odd if index == rank else usual for index in range(size)]


def test_equal_replicas_give_no_verdict() -> None:
    replicas = Replicas(3).begin()
    for step in (1, 2, 4, 8, 16, 32, 50, 100):
        replicas.step(step)
    assert replicas.end(100).verdicts == []


@pytest.mark.parametrize("size", [3, 64])
def test_the_first_parameter_the_minority_and_the_steps_are_named(size: int) -> None:
    replicas = Replicas(size).begin().step(1).step(2)
    [verdict] = replicas.step(4, parameters=other(size, 1, [4, 22, 33], [4, 99, 99])).verdicts
    assert verdict.kind == "diverged"
    assert verdict.ranks == [1]
    assert "conv.bias is not the same" in verdict.text
    assert "after step 4; after step 2 they were still equal" in verdict.text


def test_of_two_ranks_both_are_named_where_no_cause_shows() -> None:
    [verdict] = Replicas(2).begin().step(1, parameters=[[1, 2, 3], [1, 2, 4]]).verdicts
    assert verdict.ranks == [0, 1]
    assert "fc.weight" in verdict.text


def test_parameters_that_were_never_broadcast() -> None:
    [verdict] = Replicas(3, broadcast=False).begin(parameters=other(3, 2, EQUAL, [0, 22, 33])).verdicts
    assert (verdict.kind, verdict.ranks, verdict.step) == ("diverged", [2], 0)
    assert "never broadcast" in verdict.text
    assert "hora.broadcast_parameters(model, root_rank=0)" in verdict.advice


def test_seeds_that_differ_are_the_cause_of_different_starts() -> None:
    replicas = Replicas(2, broadcast=False).begin(parameters=[EQUAL, [0, 1, 2]], seed=[3, 4])
    [verdict] = replicas.verdicts
    assert (verdict.kind, verdict.ranks) == ("different-init", [0, 1])
    assert "3 on rank 0, 4 on rank 1" in verdict.text


def test_what_changed_after_the_broadcast_is_at_fault() -> None:
    [verdict] = Replicas(2).begin(parameters=[EQUAL, [11, 0, 33]], changed=[[], [1]]).verdicts
    assert verdict.ranks == [1]
    assert "conv.bias was changed on rank 1" in verdict.text


def test_a_state_restored_on_one_rank() -> None:
    replicas = Replicas(2).begin(state=[[7, 7, 7], [0, 0, 0]], stateful=[True, False])
    [verdict] = replicas.verdicts
    assert verdict.ranks == [0]
    assert "restored on rank 0 only" in verdict.text


def test_hyper_parameters_that_differ_are_named_with_their_values() -> None:
    rates = other(3, 2, [{"lr": 0.1}], [{"lr": 0.3}])
    [verdict] = Replicas(3).begin().step(1, parameters=other(3, 2, EQUAL, [0, 0, 0]), rates=rates).verdicts
    assert verdict.ranks == [2]
    assert "lr differs: 0.1 on rank 0 and 0.3 on rank 2" in verdict.text


def test_a_parameter_written_on_one_rank() -> None:
    written = [[], [{"step": 2, "until": 3, "which": [2], "digest": None}]]
    replicas = Replicas(2).begin().step(1).step(2)
    [verdict] = replicas.step(4, parameters=[EQUAL, [11, 22, 0]], written=written).verdicts
    assert verdict.ranks == [1]
    assert (
        "fc.weight was written to outside the optimizer, between steps 2 and 3, on rank 1 only"
        in verdict.text
    )


def test_gradients_changed_after_they_were_averaged() -> None:
    gradients = [[5, 6, 7], [5, 6, 8]]
    [verdict] = Replicas(2).begin().step(1, parameters=[EQUAL, [0, 0, 0]], gradients=gradients).verdicts
    assert "that of fc.weight" in verdict.text
    assert "had been averaged" in verdict.text


def local_gradients(**start: Any) -> Replicas:
    replicas = Replicas(2, distributed=False, **start).begin()
    return replicas.step(1, parameters=[EQUAL, [0, 0, 0]], gradients=[[1, 1, 1], [2, 2, 2]])


def test_gradients_that_were_never_averaged_wait_for_what_comes() -> None:
    replicas = local_gradients()
    assert replicas.verdicts == []
    assert [record["kind"] for _, record in replicas.stage.desk.sent] == ["closely", "closely"]
    [verdict] = replicas.end(5, parameters=[EQUAL, [0, 0, 0]]).verdicts
    assert "never averaged" in verdict.text
    assert "hora.DistributedOptimizer(SGD(...), model)" in verdict.advice


@pytest.mark.parametrize(
    ("signature", "text", "named"),
    [
        ({}, "torch.distributed: all_reduce SUM of 9 elements of float32", True),
        ({}, "torch.distributed: all_reduce SUM of 1 elements of float32", False),
        ({"collective": "allreduce", "dtype": ["float32"], "shape": [[3, 3]]}, "allreduce", True),
        ({"collective": "allreduce", "dtype": ["int64"], "shape": [[3, 3]]}, "allreduce", False),
        ({"collective": "average gradients", "dtype": ["float32"], "shape": [[9]]}, "average", False),
    ],
)
def test_scripts_that_reduce_tensors_may_have_averaged(
    signature: dict[str, Any], text: str, named: bool
) -> None:
    replicas = Replicas(2, distributed=False).begin()
    for rank in range(2):
        call = {"kind": "call", "id": 1, "signature": signature, "text": text, "where": "train.py:9"}
        replicas.send(rank, call, {})
    replicas.step(1, parameters=[EQUAL, [0, 0, 0]], gradients=[[5, 6, 7], [5, 6, 8]])
    [verdict] = replicas.end(5, parameters=[EQUAL, [0, 0, 0]]).verdicts
    assert ("at train.py:9" in verdict.text and "first that of fc.weight" in verdict.text) is named
    assert ("never averaged" in verdict.text) is not named


def test_a_call_around_the_wrapper() -> None:
    replicas = local_gradients(broadcast=False, together="DistributedDataParallel")
    [verdict] = replicas.end(5, parameters=[EQUAL, [0, 0, 0]]).verdicts
    assert "around its wrapper" in verdict.text


def test_models_that_are_averaged_now_and_then_are_meant() -> None:
    replicas = local_gradients()
    for rank in (0, 1):
        replicas.send(rank, {"kind": "again", "key": "1", "step": 7, "parameters": "ab", "left": 20}, {})
    assert replicas.end(9, parameters=[EQUAL, [0, 0, 0]]).verdicts == []


def test_models_averaged_at_the_end_are_meant() -> None:
    assert local_gradients().end(9).verdicts == []


def test_equal_models_that_never_meet_are_work_of_their_own() -> None:
    assert local_gradients(broadcast=False).end(9, parameters=[EQUAL, [0, 0, 0]]).verdicts == []


def test_different_models_are_work_of_their_own() -> None:
    replicas = Replicas(2, distributed=False, broadcast=False).begin(parameters=[EQUAL, [0, 0, 0]])
    replicas.step(1, parameters=[EQUAL, [9, 9, 9]])
    assert replicas.end(9, parameters=[EQUAL, [9, 9, 9]]).verdicts == []


@pytest.mark.parametrize(
    ("name", "words"), [("bn.running_mean", "SyncBatchNorm"), ("scale", "persistent=False")]
)
def test_buffers_that_stayed_local(name: str, words: str) -> None:
    replicas = Replicas(2).begin().step(1)
    [verdict] = replicas.end(1, buffers=[{name: 1, "other": 2}, {name: 3, "other": 2}]).verdicts
    assert verdict.kind == "diverged"
    assert name in verdict.text
    assert words in verdict.advice


def test_a_report_of_a_fault_is_shown_and_a_broken_record_complained_of() -> None:
    replicas = Replicas(2).begin()
    replicas.send(1, {"kind": "trouble", "text": "ValueError: x"}, {})
    replicas.send(1, {"kind": "print", "key": "1"}, {})
    assert "rank 1" in replicas.stage.desk.complaints[0]
    assert len(replicas.stage.desk.complaints) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([[[5, [0.05]]], [[7, [0.05]]]], "for step 5 to 0.05 on rank 0 and not on rank 1."),
        ([[[5, [0.05]], [7, [0.02]]], [[5, [0.05]], [7, [0.03]]]], "for step 7 to 0.02 on rank 0 and 0.03"),
        ([[], [[6, [0.05]]]], "for step 6 to 0.05 on rank 1 and not on rank 0."),
    ],
)
def test_a_learning_rate_that_was_changed_at_another_step(changes: list[Any], words: str) -> None:
    replicas = Replicas(2).begin().step(4).step(8, parameters=[EQUAL, [11, 0, 33]], steered=changes)
    [verdict] = replicas.verdicts
    assert words in verdict.text
    assert "scheduler.step(hora.mean(loss))" in verdict.advice


def test_ranks_show_whether_they_train_one_model() -> None:
    def one(replicas: Replicas) -> bool:
        return replicas.stage.judge.replicas.is_one_training("1", steps=1)

    alone: dict[str, Any] = {"distributed": False, "broadcast": False}
    different = [EQUAL, [11, 0, 33]]
    assert one(Replicas(2).begin())
    assert one(Replicas(2, **alone, together="DistributedDataParallel").begin())
    assert not one(Replicas(2, **alone).begin())
    assert not one(Replicas(2, **alone).begin(parameters=different))
    assert one(Replicas(2, **alone).begin().step(1))  # stepped on different samples, and still equal
    assert not one(Replicas(2, **alone).begin().step(1, parameters=different))

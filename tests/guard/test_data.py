"""What ranks report of the data they were fed, and what the judge makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.guard.stage import Stage

from hora.guard.verdict import Verdict


class Feeding:
    """The first steps of an optimizer on all ranks."""

    def __init__(self, size: int = 2, **start: Any) -> None:
        self.stage = Stage(size)
        self.steps = 0
        start = {"kind": "replica", "key": "1", "members": list(range(size)), "together": None} | start
        start = {"distributed": True, "broadcast": False, "parameters": [1], "state": [1]} | start
        for rank in range(size):
            self.stage.post[rank].append(start)

    def step(self, **by_rank: Sequence[Any]) -> Feeding:
        self.steps += 1
        size = self.stage.size
        usual = {"local": None, "inputs": None, "noise": None, "states": None, "fetched": {}}
        for rank in range(size):
            values = usual | {name: given[rank] for name, given in by_rank.items()}
            record = {"kind": "fed", "key": "1", "members": list(range(size)), "step": self.steps}
            self.stage.post[rank].append(record | values | {"where": "train.py:9"})
        self.stage.look()
        return self

    def end(self) -> Feeding:
        for rank in range(self.stage.size):
            self.stage.judge.ended(rank, well=True)
        self.stage.look()
        return self

    @property
    def verdicts(self) -> list[Verdict]:
        assert self.stage.desk.complaints == []
        return [verdict for verdict, _ in self.stage.desk.verdicts]


def test_equal_samples_in_three_steps_are_the_same_data() -> None:
    feeding = Feeding(3)
    for step in range(2):
        feeding.step(inputs=[f"a{step}", "b", f"a{step}"], local=["x", "y", "z"])
        assert feeding.verdicts == []
    [verdict] = feeding.step(inputs=["a9", "c", "a9"], local=["x", "y", "z"]).verdicts
    assert (verdict.kind, verdict.ranks, verdict.step) == ("same-data", [0, 2], 3)


def test_equal_gradients_are_the_same_data_where_nothing_else_shows() -> None:
    feeding = Feeding()
    for step in range(3):
        feeding.step(local=[f"a{step}", f"a{step}"])
    [verdict] = feeding.verdicts
    assert verdict.kind == "same-data"
    assert "equal to the last bit" in verdict.text


def test_ranks_that_do_not_train_one_model_may_well_use_the_same_data() -> None:
    feeding = Feeding(distributed=False)
    for step in range(4):
        feeding.step(inputs=[f"a{step}", f"a{step}"])
    assert feeding.end().verdicts == []


def test_a_run_of_one_step_is_judged_at_its_end() -> None:
    feeding = Feeding().step(inputs=["a", "a"], local=["x", "x"])
    assert feeding.verdicts == []
    assert [verdict.kind for verdict in feeding.end().verdicts] == ["same-data"]


@pytest.mark.parametrize(
    "steps",
    [
        [{"inputs": ["a", "b"], "local": ["x", "x"]}] * 4,  # other samples, by chance the same gradients
        [{"local": [None, None]}] * 4,  # all gradients are zero
        [{"inputs": ["a", "a"], "local": ["x", "y"]}] * 4,  # a constant input, and samples drawn inside
        [{"inputs": ["a", "a"], "local": ["x", "x"]}, {"inputs": ["b", "c"], "local": ["x", "y"]}] * 3,
    ],
)
def test_what_is_not_the_same_data(steps: list[dict[str, list[str]]]) -> None:
    feeding = Feeding()
    for step in steps:
        feeding.step(**step)
    assert feeding.end().verdicts == []


@pytest.mark.parametrize("what", ["states", "noise", "fetched"])
def test_equal_noise_for_different_samples(what: str) -> None:
    feeding = Feeding()
    for step in range(3):
        drawn: Any = {"torch": f"n{step}"} if what == "fetched" else f"n{step}"
        feeding.step(inputs=[f"a{step}", f"b{step}"], local=["x", "y"], **{what: [drawn, drawn]})
    [verdict] = feeding.verdicts
    assert verdict.kind == "same-noise"
    assert "torch.manual_seed(seed + hora.rank())" in verdict.advice


def test_the_generator_that_a_data_set_uses_is_the_one_to_seed() -> None:
    feeding = Feeding()
    for step in range(3):
        fetched = [{"torch": f"{rank}", "numpy": f"{step}"} for rank in range(2)]
        feeding.step(inputs=[f"a{step}", f"b{step}"], fetched=fetched)
    [verdict] = feeding.verdicts
    assert verdict.advice.endswith("numpy.random.seed(seed + hora.rank()).")


@pytest.mark.parametrize(("how", "words"), [("workers", "of a rank draw"), ("epochs", "in each epoch")])
def test_noise_that_loader_workers_repeat_is_told_by_a_rank(how: str, words: str) -> None:
    feeding = Feeding()
    record = {"kind": "noise", "how": how, "generator": "worker numpy", "where": "train.py:7", "step": 5}
    for rank in range(2):
        feeding.stage.post[rank].append(record)
    feeding.stage.look()
    [verdict] = feeding.verdicts
    assert (verdict.kind, verdict.where, verdict.ranks) == ("same-noise", "train.py:7", [0, 1])
    assert words in verdict.text
    assert "numpy's random generator" in verdict.text
    assert "torch.initial_seed()" in verdict.advice


def test_noise_that_differs_on_one_rank_is_no_verdict() -> None:
    feeding = Feeding(3)
    for step in range(3):
        feeding.step(inputs=["a", "b", "c"], states=[f"n{step}", f"n{step}", "other"])
    assert feeding.end().verdicts == []


def test_the_same_data_with_the_same_noise_is_told_once() -> None:
    feeding = Feeding()
    for step in range(8):
        feeding.step(inputs=[f"a{step}"] * 2, local=["x", "x"], states=[f"n{step}"] * 2)
    assert [verdict.kind for verdict in feeding.end().verdicts] == ["same-data"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("set_epoch", "sampler.set_epoch(epoch)"),
        ("generator", "Seed once"),
        ("loader", "Make the loader once"),
        ("permutation", "seed + epoch"),
    ],
)
def test_the_same_order_is_told_once_with_its_line(how: str, words: str) -> None:
    stage = Stage(2)
    for rank in (0, 1):
        stage.post[rank].append(
            {"kind": "order", "how": how, "where": "train.py:3", "what": "Sampler", "step": 9}
        )
    stage.look()
    [(verdict, stop)] = stage.desk.verdicts
    assert (verdict.kind, verdict.where, verdict.step, stop) == ("same-order", "train.py:3", 9, False)
    assert words in verdict.advice


@pytest.mark.parametrize("one", [True, False])
def test_models_of_their_own_may_have_the_same_data_and_noise(one: bool, monkeypatch: Any) -> None:
    for alike in (True, False):
        feeding = Feeding()
        monkeypatch.setattr(feeding.stage.judge.replicas, "is_one_training", lambda key, steps: one)
        for step in range(4):
            second = f"a{step}" if alike else f"b{step}"
            feeding.step(inputs=[f"a{step}", second], states=[None, None] if alike else ["s", "s"])
        assert len(feeding.end().verdicts) == one

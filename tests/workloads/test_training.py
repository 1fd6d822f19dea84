"""Training steps: golden losses, equality over the number of workers, what is left untouched.

``python -m tests.workloads.test_training`` writes the golden losses again; do so only when a change is meant
to change them, and say why in the commit.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import ranks, run_ranks
from tests.workloads.splits import first

import hora.torch as hora
from hora.core.errors import TrainingError
from hora.core.notices import StopForNow
from hora.core.rundir import RunDirectory
from hora.mlperf import MLPerfLog
from hora.workloads import calibration
from hora.workloads.loop import check_finite
from hora.workloads.pace import Pace
from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet import train as training
from hora.workloads.resnet.config import PROFILES, SMALL, ModelConfig, Profile
from hora.workloads.resnet.data import load
from hora.workloads.resnet.learner import Learner, compute_dtype
from hora.workloads.resnet.train import calibrate, indices, learning_rate, train

GOLDEN = Path(__file__).parents[1] / "golden" / "resnet.json"
STEPS = 6


def exact_profile(norm: str, **changes: Any) -> Profile:
    quick = PROFILES["quick"]
    return dataclasses.replace(
        quick,
        data=dataclasses.replace(quick.data, path=fashion_mnist.SHIPPED),
        model=dataclasses.replace(SMALL, norm=norm),
        precision="float64",
        global_batch=16,
        **changes,
    )


def first_losses(profile: Profile) -> list[float]:
    """The mean loss over the global batch of each of the first steps."""
    data = load(profile.data)
    learner = Learner(profile)
    loader = hora.data_loader(indices(data.train), global_batch=profile.global_batch, seed=profile.seed)
    losses = []
    for step, (samples,) in enumerate(itertools.islice(loader, STEPS)):
        batch = data.train.batch(samples.tolist(), seed=profile.seed, epoch=loader.epoch)
        # From the middle of the warm-up, so that the weights move.
        lr = learning_rate(profile, 300 + step, steps_per_epoch=len(loader))
        losses.append(hora.mean(learner.step(*learner.put(batch), lr=lr), weight=len(samples)))
    return losses


def golden() -> dict[str, list[float]]:
    found = {}
    for optimizer in PROFILES["quick"].optimizers:
        for norm, size in (("none", 1), ("batch", 1), ("batch", 2)):
            profile = exact_profile(norm, optimizers=(optimizer,))
            found[f"{optimizer.name}, norm {norm}, {size} ranks"] = run_ranks(size, first_losses, profile)[0]
    return found


@pytest.mark.parametrize("optimizer", PROFILES["quick"].optimizers, ids=lambda config: config.name)
@pytest.mark.parametrize(("norm", "size"), [("none", 1), ("none", 2), ("batch", 1), ("batch", 2)])
def test_golden_losses(optimizer: Any, norm: str, size: int) -> None:
    results = run_ranks(size, first_losses, exact_profile(norm, optimizers=(optimizer,)))
    # Without batch normalization any number of workers computes the same.
    expected = json.loads(GOLDEN.read_text())[
        f"{optimizer.name}, norm {norm}, {1 if norm == 'none' else size} ranks"
    ]
    for losses in results:
        assert losses == pytest.approx(expected, rel=1e-9, abs=0)


def test_the_same_seed_gives_identical_losses_and_another_does_not() -> None:
    def losses(seed: int) -> list[float]:
        profile = dataclasses.replace(exact_profile("batch"), precision="auto", seed=seed)
        return first_losses(profile)

    one, again, other = (run_ranks(2, losses, seed)[0] for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_learning_rate_of_the_quick_profile_by_hand() -> None:
    profile = dataclasses.replace(PROFILES["quick"], epochs=10)
    rate = lambda step: learning_rate(profile, step, steps_per_epoch=78)  # noqa: E731
    assert rate(0) == pytest.approx(0.1 / 78)
    assert rate(77) == pytest.approx(0.1)
    assert rate(78 + 351) == pytest.approx(1e-4 + (0.1 - 1e-4) / 4)  # half of the 702 steps of the decay
    assert rate(780) == 1e-4


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_the_training(loss: float) -> None:
    check_finite(3.0, step=4, lr=0.1)
    with pytest.raises(TrainingError, match="loss up to step 5 is .* learning rate 0.2"):
        check_finite(loss, step=5, lr=0.2)


@ranks(2)
def test_a_training_that_diverges_ends_on_every_rank() -> None:
    config = dataclasses.replace(PROFILES["quick"].optimizer, lr=1e30, warmup_epochs=0.0)
    profile = exact_profile("none", optimizers=(config,), calibration_seconds=0.0)
    profile = dataclasses.replace(profile, model=dataclasses.replace(tiny(), norm="none"))
    with pytest.raises(TrainingError, match="up to step 5"):
        train(Learner(profile), first(profile.data, 160, 20), MLPerfLog(None), started=0.0)


def tiny() -> ModelConfig:
    return dataclasses.replace(SMALL, stem_width=4, widths=(4, 8, 16), depths=(1, 1, 1))


def snapshot(learner: Learner) -> list[torch.Tensor]:
    return [value.clone() for value in learner.model.state_dict().values()]


@ranks(2)
def test_calibration_touches_nothing_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "ROUND_SECONDS", 0.01)
    profile = dataclasses.replace(exact_profile("batch", calibration_seconds=0.01), model=tiny())
    learner = Learner(profile)
    before, random_state, numpy_state = (
        snapshot(learner),
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
    )
    gradients = [parameter.grad for parameter in learner.model.parameters()]

    scaling = calibrate(learner)

    assert scaling is not None
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner), strict=True))
    assert [parameter.grad for parameter in learner.model.parameters()] == gradients
    assert not learner.optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert len(scaling.rounds) == calibration.MINIMUM_ROUNDS
    assert 0 < scaling.low <= scaling.factor <= scaling.high


@ranks(2)
def test_calibration_counts_samples_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that only steps advance: alone a step takes 1 s, together rank 0 takes 1.25 s and rank 1 0.5 s.
    now = [0.0]
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

    def step(seconds: float) -> None:
        now[0] += seconds

    together = (1.25, 0.5)[hora.rank()]
    scaling = calibration.measure(lambda: step(1.0), lambda: step(together), samples=64, seconds=3.6)
    assert scaling.rounds == ((64.0, 102.4),) * 6  # 2 x 64 samples in the 1.25 s of the slower one
    assert (scaling.factor, scaling.low, scaling.high) == pytest.approx((1.6, 1.6, 1.6))


@ranks(2)
def test_a_slow_spell_of_the_machine_does_not_move_the_scaling_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # From the 100th second on all takes three times as long: throughputs move, their ratio does not.
    now = [0.0]
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

    def step(seconds: float) -> None:
        now[0] += seconds * (3.0 if now[0] > 100.0 else 1.0)

    scaling = calibration.measure(lambda: step(5.0), lambda: step(5.0), samples=64, seconds=12.0)
    assert len({one for one, _ in scaling.rounds}) > 1
    assert scaling.factor == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("count", "kth"),
    [(3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (13, 3), (20, 6)],  # the table of the sign test at 95 %
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, kth: int) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert calibration.interval(values) == (kth, count + 1 - kth)


@ranks(1)
def test_one_worker_has_no_scaling_factor() -> None:
    assert calibrate(Learner(dataclasses.replace(exact_profile("batch"), model=tiny()))) is None


@ranks(3)
def test_evaluation_takes_each_sample_once_and_all_ranks_agree() -> None:
    profile = dataclasses.replace(exact_profile("batch"), model=tiny())
    data = first(profile.data, 64, 101)  # neither the workers nor the batch divide it
    learner = Learner(profile)
    # Statistics of the normalizations that differ between the ranks are averaged first.
    learner.model.blocks[0].norm1.running_mean.fill_(float(hora.rank()))
    loader = hora.data_loader(indices(data.test), global_batch=20, shuffle=False, tail="uneven")
    loss, accuracy = learner.evaluate(data.test, loader)
    assert learner.model.blocks[0].norm1.running_mean.tolist() == [1.0] * 4

    images, labels = learner.put(data.test.batch(range(101)))
    logits = learner.predict(images)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-12)
    assert accuracy == int((logits.argmax(1) == labels).sum()) / 101
    assert learner.model.training


@ranks(2)
def test_training_stops_at_the_target_or_trains_on() -> None:
    profile = dataclasses.replace(
        exact_profile("batch"), model=tiny(), epochs=3, target=0.0, calibration_seconds=0
    )
    for train_on, epochs in ((False, 1), (True, 3)):
        chosen = dataclasses.replace(profile, train_on=train_on)
        outcome = train(Learner(chosen), first(chosen.data, 64, 20), MLPerfLog(None), started=0.0)
        assert (outcome.reached, outcome.epochs, outcome.steps) == (True, epochs, 4 * epochs)
    unreachable = dataclasses.replace(profile, target=1.0)
    outcome = train(Learner(unreachable), first(unreachable.data, 64, 20), MLPerfLog(None), started=0.0)
    assert (outcome.reached, outcome.epochs) == (False, 3)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    profile = exact_profile("batch", epochs=2, target=0.0, train_on=True, calibration_seconds=0.01)
    profile = dataclasses.replace(profile, model=tiny(), precision="float32")

    def body() -> None:
        training.images.load = lambda config: first(config, 320, 200)
        training.run(profile)

    run_ranks(2, body, run_dir=tmp_path / "run")
    left = RunDirectory.open(tmp_path / "run")
    about = left.about()
    assert about["config"]["optimizer"]["name"] == "sgd"
    assert about["world"]["size"] == 2
    assert about["versions"]["torch"] == torch.__version__
    summary = about["summary"]
    assert (summary["workload"], summary["epochs"], summary["steps"]) == ("resnet", 2, 40)
    assert summary["scaling_factor"] == summary["scaling"]["factor"]
    assert summary["scaling"]["low"] <= summary["scaling_factor"] <= summary["scaling"]["high"]

    records = left.read_metrics()
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(5, 41, 5))
    evaluations = [r for r in records if r["kind"] == "eval"]
    assert [r["epoch"] for r in evaluations] == [1.0, 2.0]
    assert evaluations[-1]["accuracy"] == summary["accuracy"]
    assert all(len(r["samples_per_second_per_rank"]) == 2 for r in records if r["kind"] == "train")

    shown = json.loads((left.path / "predictions.json").read_text())
    assert shown["classes"][0] == "T-shirt/top"
    assert len(shown["images"]) == 40
    assert any(image["label"] != image["predicted"] for image in shown["images"])
    assert all(0 < image["confidence"] <= 1 for image in shown["images"])


@pytest.mark.parametrize("stop_at", [3, 25])  # in the first epoch, and in the second after an evaluation
def test_a_training_that_was_asked_to_stop_goes_on_to_the_same_end(tmp_path: Path, stop_at: int) -> None:
    profile = exact_profile("batch", epochs=3, target=1.0, calibration_seconds=0.0, checkpoint_every=10)
    profile = dataclasses.replace(profile, model=tiny(), log_every=1)

    def body(asked_in: int | None) -> bool:
        training.images.load = lambda config: first(config, 320, 200)
        counted = itertools.count(1)
        count = Pace.count

        def and_ask(self: Any, *args: Any, **options: Any) -> None:
            if next(counted) == asked_in and hora.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            count(self, *args, **options)

        Pace.count = and_ask
        try:
            training.run(profile)
        except StopForNow:
            return True
        return False

    assert run_ranks(2, body, None, run_dir=tmp_path / "whole") == [False, False]
    assert run_ranks(2, body, stop_at, run_dir=tmp_path / "first") == [True, True]
    rest = {"run_dir": tmp_path / "rest", "resume": tmp_path / "first"}
    assert run_ranks(2, body, None, **rest) == [False, False]

    whole, head, tail = (RunDirectory.open(tmp_path / name) for name in ("whole", "first", "rest"))
    kept = ("kind", "step", "loss", "lr", "accuracy")
    told = [
        [[record.get(key) for key in kept] for record in run.read_metrics()] for run in (whole, head, tail)
    ]
    assert told[1] + told[2] == told[0]  # to the last bit
    assert told[2][0][1] == stop_at + 2  # one step edge after the one at which the signal was seen
    ends = [run.about()["summary"] for run in (whole, tail)]
    for key in ("accuracy", "reached", "epochs", "steps"):
        assert ends[0][key] == ends[1][key]
    assert ends[1]["time_to_train"] > 0


def test_precision_is_detected_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for capabilities, expected in (
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert compute_dtype("auto", cpu) == expected
    assert compute_dtype("float64", cpu) == torch.float64


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")

"""Each cause is named for the script that has it, and shown by an experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.conftest import SCRIPTS, Ask

GROWS = "step 1 uses 4 samples with 1 worker and 8 with 2"
RATES = (
    "In step 1 it is 0.01 with 1 worker and 0.04 with 2, 4 times as much, while the global batch is 2 times"
)

WRONG = {
    "batch_per_worker": (["samples"], 1, GROWS),
    "own_order": (["samples"], 1, "of the 12 samples of step 1"),
    "stream": (["samples"], 1, "step 1 uses 6 samples with 1 worker and 12 with 2"),
    "rate_by_size": (
        ["learning-rate"],
        1,
        "it is 0.1 with 1 worker and 0.2 with 2, 2 times as much, although",
    ),
    "rate_twice": (["samples", "learning-rate"], 1, RATES),
    "rate_unscaled": (["samples", "learning-rate"], 1, "It is not scaled: 0.01 in both runs"),
    "schedule": (["learning-rate"], 2, "In step 2 it is 0.00175 with 1 worker and 0.0025 with 2"),
    "first_parameters": (["initial-parameters"], 1, "rank 1 starts with another weight"),
    "never_averaged": (["averaging"], 1, "ranks 0 and 1 step with different gradients"),
    "summed": (["averaging"], 1, "the gradient is 2 times as large as with 1 worker"),
    "unequal": (["weighting"], 3, "in step 3, means over 1 to 2 values count alike"),
    "tokens": (["weighting"], 1, "A mean of means: in step 1"),
    "masked": (["weighting"], 1, "A mean of means: in step 1"),
    "tail": (["tail"], 5, "with 2 workers step 5 has 1 of 3 passes"),
    "batch_norm": (["batch-norm"], 1, "SyncBatchNorm"),
    "dropout": (["randomness"], 1, "dropout"),
    "noise": (["randomness"], 1, "random numbers"),
    "augmented": (["randomness"], 1, "the same samples with other content"),
    "clipped": (["clipping"], 1, "clips its own gradient"),
    "clipped_by_hand": (["clipping"], 1, "clips its own gradient"),
    "two_causes": (["batch-norm", "randomness"], 1, "Only without all 2 the runs agree."),
}


@pytest.mark.parametrize("script", WRONG)
def test_the_cause_is_named(ask: Ask, script: str) -> None:
    causes, step, text = WRONG[script]
    report = ask(script, steps=6)
    assert [found.name for found in report.causes] == causes
    assert report.compared.parting is not None
    assert report.compared.parting.step == step
    assert not report.equal
    assert text in " ".join(report.lines())
    shown = [experiment for experiment in report.experiments if experiment.agreed]
    assert set(shown[-1].causes) == set(causes)
    assert shown[-1].largest is not None
    assert shown[-1].largest < 1e-9


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("batch_per_worker", "with 2 times the batch and 2 times its learning rate: 6 steps"),
        ("rate_unscaled", "with 2 times the batch and its learning rate, not scaled: 6 steps"),
    ],
)
def test_a_batch_per_worker_can_be_accepted(ask: Ask, script: str, words: str) -> None:
    report = ask(script, steps=6, per_worker_batch=True)
    assert report.equal
    assert report.causes == []
    assert report.lines()[0].startswith(f"2 workers = 1 worker on the same samples, {words}")
    assert report.compared.largest < 1e-9


@pytest.mark.parametrize(
    ("script", "causes"),
    [
        ("rate_twice", ["learning-rate"]),
        ("same_samples", ["samples"]),
        ("own_order", ["samples"]),  # as many samples as one worker uses, and others
        ("never_averaged", ["averaging"]),
    ],
)
def test_all_else_is_judged_where_a_batch_per_worker_is_accepted(
    ask: Ask, script: str, causes: list[str]
) -> None:
    report = ask(script, steps=6, per_worker_batch=True)
    assert not report.equal
    assert [found.name for found in report.causes] == causes
    if script == "rate_twice":
        assert "it is scaled twice" in report.causes[0].why
        assert "accepted: 1 worker on the same samples, with 2 times the batch" in " ".join(report.lines())


def test_workers_that_read_the_same_are_found_although_nothing_else_differs(ask: Ask) -> None:
    report = ask("same_samples")
    assert report.compared.parting is None
    assert [found.name for found in report.causes] == ["samples"]
    assert "8 of the 8 samples of step 1 are used by several workers" in report.causes[0].why
    assert not report.equal


@pytest.mark.parametrize(
    ("script", "removal", "line"),
    [("metric_mean", "metric-weights", 21), ("metric_padded", "metric-shares", 26)],
)
def test_a_metric_that_averages_averages(ask: Ask, script: str, removal: str, line: int) -> None:
    report = ask(script, steps=12)
    assert [found.name for found in report.causes] == ["metric"]
    assert f"{script}.py:{line}, after step 4," in report.causes[0].why
    assert [experiment.removals for experiment in report.experiments if experiment.agreed] == [(removal,)]


def test_a_script_that_cannot_compute_in_float64_is_judged_in_its_own_dtype(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "dropout.py").read_text()
    script.write_text(text + "    assert model[0].weight.dtype is torch.float32\n")
    report = ask(script, steps=3)
    assert [found.name for found in report.causes] == ["randomness"]
    assert report.compared.tolerance.dtype == "float32"


def test_what_checkpoints_compute_again_is_changed_too(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "dropout.py").read_text()
    text = text.replace("model(x)", "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)")
    script.write_text(text.replace("import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1))
    report = ask(script, steps=3)
    assert [found.name for found in report.causes] == ["randomness"]


def test_what_no_experiment_removes_is_said_to_be_unknown(ask: Ask) -> None:
    report = ask("unknown", steps=2)
    assert report.causes == []
    assert not report.equal
    assert "none of the known causes" in report.lines()[1]
    tried = {experiment.causes: experiment.agreed for experiment in report.experiments}
    assert tried["randomness",] is False
    assert tried["batch-norm",] is None

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.workloads.splits import easy

from hora.core.errors import DiskFullError, MissingExtraError, RunDirectoryError
from hora.mlperf import MLPerfLog, resnet_hyperparameters
from hora.workloads.loop import Outcome
from hora.workloads.resnet import fashion_mnist, train
from hora.workloads.resnet.config import PROFILES, SMALL


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def compliance(path: Path) -> tuple[int, str]:
    """What MLPerf's own compliance checker says."""
    checker = [
        sys.executable,
        "-m",
        "mlperf_logging.compliance_checker",
        "--usage",
        "training",
        "--ruleset",
        "0.7.0",
    ]
    done = subprocess.run(
        [*checker, "--log_output", str(path.with_suffix(".check")), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a real training on two ranks that beats the 0.759 of the rules."""
    directory = tmp_path_factory.mktemp("mlperf") / "run"
    quick = PROFILES["quick"]
    profile = dataclasses.replace(
        quick,
        data=dataclasses.replace(quick.data, path=fashion_mnist.SHIPPED),
        model=dataclasses.replace(SMALL, stem_width=8, widths=(8, 16, 32), depths=(1, 1, 1)),
        target=0.8,
        epochs=5,
        calibration_seconds=0.0,
    )

    def body() -> Outcome:
        train.images.load = lambda config: easy(config, 1024, 300)
        return train.run(profile)

    outcomes = run_ranks(2, body, run_dir=directory)
    assert all(outcome.reached for outcome in outcomes), outcomes
    return directory / "mlperf.log"


@pytest.mark.parametrize("division", ["open", "closed"])
def test_the_compliance_checker_says_success(trained: Path, tmp_path: Path, division: str) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text(trained.read_text().replace('"value": "open"', f'"value": "{division}"'))
    code, output = compliance(log)
    assert code == 0, output
    assert "SUCCESS" in output


@pytest.mark.parametrize("key", ["sgd_opt_momentum", "run_stop"])
def test_the_checker_fails_a_log_without_a_key(trained: Path, tmp_path: Path, key: str) -> None:
    log = tmp_path / "result_0.txt"
    text = trained.read_text().replace('"value": "open"', '"value": "closed"')
    kept = [line for line in text.splitlines(keepends=True) if f'"key": "{key}"' not in line]
    assert len(kept) == len(text.splitlines()) - 1
    log.write_text("".join(kept))
    code, output = compliance(log)
    assert code == 1, output
    assert "FAILED" in output


def test_the_log_says_what_it_is_and_is_in_order(trained: Path) -> None:
    records = lines(trained)
    values = {record["key"]: record["value"] for record in records}
    comment = next(r["metadata"]["comment"] for r in records if r["key"] == "submission_benchmark")
    assert "Not an MLPerf result" in comment
    assert (values["submission_org"], values["submission_division"]) == ("Hora", "open")
    assert (values["global_batch_size"], values["model_bn_span"]) == (128, 64)
    assert (values["train_samples"], values["eval_samples"]) == (1024, 300)
    assert values["sgd_opt_learning_rate_decay_steps"] == 4 * 8  # five epochs, one of warm-up
    assert values["eval_accuracy"] >= 0.8
    order = [record["key"] for record in records]
    moments = [
        "init_start",
        "init_stop",
        "run_start",
        "epoch_start",
        "epoch_stop",
        "eval_start",
        "eval_accuracy",
    ]
    assert [order.index(key) for key in moments] == sorted(order.index(key) for key in moments)
    assert order[-1] == "run_stop"
    assert records[-1]["metadata"]["status"] == "success"
    assert all(not Path(record["metadata"]["file"]).is_absolute() for record in records)
    epochs = [r["metadata"]["epoch_num"] for r in records if r["key"] == "eval_accuracy"]
    assert epochs == list(range(1, len(epochs) + 1))


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_a_log_of_either_optimizer_passes_the_closed_rules(tmp_path: Path, optimizer: str) -> None:
    path = tmp_path / "result_0.txt"
    with MLPerfLog(path) as log:
        log.submission("resnet", division="closed", platform="test")
        log.event("cache_clear", False)
        log.start("init_start")
        hyperparameters = resnet_hyperparameters(
            optimizer,
            global_batch=128,
            lr=0.2,
            end_lr=1e-4,
            power=2.0,
            decay_steps=100,
            warmup_epochs=1.0,
            momentum=0.9,
            weight_decay=4e-4,
            epsilon=0.0,
            bn_span=64,
        )
        for key, value in hyperparameters.items():
            log.event(key, value)
        log.stop("init_stop")
        log.start("run_start")
        log.event("train_samples", 10)
        log.event("eval_samples", 10)
        log.start("epoch_start", epoch_num=1)
        log.stop("epoch_stop", epoch_num=1)
        log.start("eval_start", epoch_num=1)
        log.event("eval_accuracy", 0.8, epoch_num=1)
        log.stop("eval_stop", epoch_num=1)
        log.stop("run_stop", status="success")
    code, output = compliance(path)
    assert code == 0, output


def test_every_profile_keeps_to_the_fixed_values_of_the_rules() -> None:
    for profile in PROFILES.values():
        for optimizer in profile.optimizers:
            assert (optimizer.end_lr, optimizer.power, optimizer.momentum) == (1e-4, 2.0, 0.9)
            assert optimizer.epsilon == 0.0
            assert optimizer.weight_decay in {1e-4 * 2**n for n in range(-3, 4)}
            assert round(optimizer.lr * 1000) == pytest.approx(optimizer.lr * 1000)


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MLPerfLog(None) as log:
        log.submission("resnet", platform="test")
        log.start("init_start")
    assert not list(tmp_path.iterdir())


def test_two_logs_stay_apart(tmp_path: Path) -> None:
    with MLPerfLog(tmp_path / "a") as a, MLPerfLog(tmp_path / "b") as b:
        a.event("seed", 1)
        b.event("seed", 2)
    assert [r["value"] for r in lines(tmp_path / "a")] == [1]
    assert [r["value"] for r in lines(tmp_path / "b")] == [2]


def test_a_missing_package_names_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hora\[workloads\]'"):
        MLPerfLog(tmp_path / "log")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        MLPerfLog(tmp_path / "missing" / "log")


def test_a_full_disk_is_an_error_not_a_hole() -> None:
    with pytest.raises(DiskFullError), MLPerfLog(Path("/dev/full")) as log:
        log.event("seed", 1)

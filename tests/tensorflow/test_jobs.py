"""Whole jobs of TensorFlow. Importing it takes so long that each runs many cases, and ranks are forked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forked import Forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"
WITH_HORA = "tensorflow_with_hora.py"

LIMIT = 110.0


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    variables = {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    forked = Forked("hora.tensorflow", patience=LIMIT, env=variables)
    yield forked
    forked.close()


def run_job(
    forked: Forked,
    workers: int,
    script: str | Path,
    *arguments: str,
    folder: Path,
    flags: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Run a script, of this folder or any other, as a job; its exit code and what was written."""
    options = ("-n", str(workers), "--run-dir", str(folder / "run"), "--timeout", str(LIMIT - 10), *flags)
    return forked.run(*options, str(HERE / script), *arguments, folder=folder)


@pytest.fixture(scope="module")
def alone(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker trains."""
    return everything(forked, 1, "auto", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("workers", "engine"), [(2, "auto"), (3, "auto"), (2, "gloo")])
def test_everything(workers: int, engine: str, alone: dict[str, Any], forked: Forked, tmp_path: Path) -> None:
    """All operations, and trainings that end as one worker's does; on TensorFlow's own runtime, too, which
    carries tensors between hosts."""
    several = everything(forked, workers, engine, tmp_path)
    assert set(several) == set(alone)
    differences = {name: np.abs(several[name] - alone[name]).max() for name in alone}
    assert max(value for name, value in differences.items() if "float32" in name) <= 1e-6, differences
    assert max(value for name, value in differences.items() if "float64" in name) <= 1e-12, differences


def everything(forked: Forked, workers: int, engine: str, folder: Path) -> dict[str, Any]:
    """The variables that the job has trained."""
    trained = folder / "trained.npz"
    flags = ("--env", f"HORA_ENGINE={engine}")
    code, text = run_job(forked, workers, "everything.py", str(trained), folder=folder, flags=flags)
    assert code == 0, text
    return dict(np.load(trained))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("act", "whose", "names"),
    [
        ("kill", 0, "rank 0 of 2 failed on"),
        ("stop", 0, "Rank 0 has made 6 steps"),
        ("raise", 1, "ArithmeticError: this rank has had enough"),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    act: str, whose: int, names: str, forked: Forked, tmp_path: Path
) -> None:
    """Within 10 seconds, and what has happened is told, whichever rank it is and wherever the others are."""
    told = tmp_path / "told"
    flags = ("--stall-after", "2", "--stall-abort", "5")
    code, text = run_job(forked, 2, "failing.py", act, str(whose), str(told), folder=tmp_path, flags=flags)
    ended = time.time()
    assert code != 0
    assert names in text, text
    assert ended - float(told.read_text()) < 10.0, text


def test_the_guard_sees_the_training(forked: Forked, tmp_path: Path) -> None:
    """Eagerly and in graphs: nothing is told of what is right, and each fault once, with its line inside the
    graph. An error that was raised there is the script's to catch."""
    code, text = run_job(forked, 2, "watched.py", folder=tmp_path)
    assert code != 0
    right = max(map(float, re.findall(r"all was right at ([\d.]+)", text)))
    verdicts = [json.loads(line) for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    found = {verdict["kind"]: verdict for verdict in verdicts}
    assert sorted(found) == ["diverged", "mismatched-calls", "not-finite", "same-data"], text
    line = {kind: int(verdict["where"].rpartition(":")[2]) for kind, verdict in found.items()}
    script = (HERE / "watched.py").read_text().splitlines()
    assert all("tape.gradient" in script[line[kind] - 1] for kind in ("diverged", "not-finite", "same-data"))
    assert all(verdict["time"] > right for verdict in verdicts)
    assert "hora.allreduce" in script[line["mismatched-calls"] - 1]
    assert found["same-data"]["ranks"] == [0, 1]
    assert "hora.shard(dataset, global_batch=...)" in found["same-data"]["advice"]
    assert "At step 5 the gradient of weights and 1 more was not a number (NaN) on rank 1." in text
    assert found["not-finite"]["ranks"] == [1]
    assert "Parameter bias is not the same on all ranks after step 4" in found["diverged"]["text"], text
    for rank in range(2):
        assert f"rank {rank} got mismatched-calls: " in text
    assert "allreduce float32 (2,) average" in text
    assert "allreduce float32 (3,) average" in text


def test_horovods_interface(forked: Forked, tmp_path: Path) -> None:
    code, text = run_job(forked, 3, "as_horovod.py", folder=tmp_path, flags=("--horovod",))
    assert code == 0, text


def test_the_examples(forked: Forked, tmp_path: Path) -> None:
    """Losses go down; two workers' are those of one."""
    plain, alone = (
        losses(forked, EXAMPLES / name, 1, tmp_path) for name in ("tensorflow_plain.py", WITH_HORA)
    )
    both = losses(forked, EXAMPLES / WITH_HORA, 2, tmp_path)
    assert len(plain) == len(alone) == len(both) == 2 * (10_000 // 96)
    for found in (plain, alone):
        assert np.mean(found[-10:]) < 0.5 * found[0]
    # float32: what is rounded otherwise in one step grows in the next ones.
    assert both[:20] == pytest.approx(alone[:20], rel=1e-6)
    assert both == pytest.approx(alone, rel=1e-2)


def losses(forked: Forked, script: Path, workers: int, folder: Path) -> list[float]:
    """What rank 0 prints."""
    made = folder / f"{script.stem} {workers}"
    made.mkdir()
    code, text = run_job(forked, workers, script, folder=made)
    assert code == 0, text
    return [float(number) for number in re.findall(r"^(?:\[0\] ?)?(\d+\.\d+)$", text, re.MULTILINE)]


def test_a_killed_rank_costs_steps_and_nothing_else(forked: Forked, tmp_path: Path) -> None:
    """Rank 0 or rank 1 is killed; the job is started anew and ends as one that was left alone."""
    found = {}
    for victim in (-1, 0, 1):
        folder = tmp_path / str(victim)
        folder.mkdir()
        out = folder / "trained.npz"
        flags = ("--restarts", "1")
        code, text = run_job(forked, 3, "elastic.py", str(victim), str(out), folder=folder, flags=flags)
        assert code == 0, text
        assert ("SIGKILL" in text) == (victim >= 0), text
        found[victim] = dict(np.load(out))
    for victim in (0, 1):
        for name, value in found[-1].items():
            np.testing.assert_array_equal(found[victim][name], value, err_msg=f"{victim} {name}")
    assert found[0]["step"] == 16

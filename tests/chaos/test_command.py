"""The command, on a real job. The undisturbed run is made once for all tests of this file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_stage import needs_namespaces

from hora import cli

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = Path(__file__).parent / "scripts" / "train.py"

# Each starts two or three workers that import torch, twice or three times, one after the other.
pytestmark = pytest.mark.timeout(600)

Chaos = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture
def chaos(folder: Path) -> Chaos:
    def run(name: str, *words: str, job: tuple[str, ...] = (), reference: Path | None = None) -> Any:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HORA_DEVICE": "cpu"}
        first = folder / "first"
        if reference is None and (first / "reference" / "chaos" / "lengths.json").exists():
            reference = first  # made by the first test that wants one
        against = () if reference is None else ("--reference", str(reference))
        command = [sys.executable, "-m", "hora", "chaos", *words, *against, "--run-dir", name]
        done = subprocess.run(
            [*command, "--", "hora", "run", "-n", "2", "--restarts", "4", *job, str(SCRIPT)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environ,
            timeout=580,
            check=False,
        )
        path = folder / name / "chaos.json"
        return done, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_killed_job_has_the_result_of_the_undisturbed_one(chaos: Chaos, folder: Path) -> None:
    done, told = chaos("first", "--seed", "2", "--kill", "1", "--at", "step")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^hora: undisturbed: 20 steps, 4 checkpoints, [\d.]+ s$", done.stderr, re.MULTILINE)
    assert "hora: disturbed, with seed 2: 1 kill" in done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "same as undisturbed: 3 metrics; 20 steps; 160 samples in 2 epochs"
    )
    (kill,) = told["disturbances"]
    assert (kill["kind"], kill["verdicts"], told["differences"]) == ("kill", ["rank-failed"], [])
    assert 0 < kill["noticed"] < kill["next_step"]
    assert told["steps"]["made"] == 20 + kill["repeated"]
    assert kill["repeated"] <= 10
    about = json.loads((folder / "first" / "disturbed" / "run.json").read_text())
    assert len(about["attempts"]) == 2


def test_a_result_that_is_another_is_exit_code_1(chaos: Chaos, folder: Path) -> None:
    """What the undisturbed run has written is changed, as if the disturbed one had lost a step."""
    if not (folder / "first").exists():
        chaos("first", "--seed", "2", "--delay", "1")
    other = folder / "other"
    shutil.copytree(folder / "first" / "reference", other)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"loss": 7.0, "accuracy": 0.5}
    (other / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    for journal in (other / "chaos").glob("*.steps"):
        journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    done, told = chaos("changed", "--seed", "1", "--delay", "1", reference=other)
    assert done.returncode == 1
    assert "not the same as undisturbed: " in done.stdout
    assert "(seed 1)" in done.stdout
    differences = "\n".join(told["differences"])
    assert re.search(
        r"the metric loss is 7 undisturbed and [\d.]+ disturbed \(relative difference 0\.\d\)", differences
    )
    assert "the metric accuracy is 0.5 undisturbed, and was never written" in differences
    assert "epoch 1: 8 samples were used, and were not undisturbed (positions 72 to 79)" in differences
    assert not told["same"]


@needs_namespaces
def test_a_full_disk_and_a_damaged_checkpoint(chaos: Chaos, folder: Path) -> None:
    done, told = chaos("full", "--seed", "5", "--fill-disk", "1", "--corrupt-checkpoint", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {one["kind"]: one for one in told["disturbances"]}
    assert set(kinds) == {"fill-disk", "corrupt-checkpoint"}
    assert "checkpoint-failed" in done.stdout
    assert "checkpoint-damaged" in done.stdout
    assert not (folder / "full" / "disturbed" / "hora-chaos-ballast").exists()
    assert (folder / "full" / "disturbed" / "report.html").exists()


@needs_namespaces
def test_connections_that_are_cut(chaos: Chaos) -> None:
    words = ("--seed", "1", "--disconnect", "1", "--at", "step")
    done, told = chaos("cut", *words, job=("--env", "HORA_ENGINE=gloo"))
    assert done.returncode == 0, done.stdout + done.stderr
    (cut,) = told["disturbances"]
    assert re.fullmatch(r"the \d+ TCP ports of rank \d \(pid \d+\) are cut off for [\d.]+ s", cut["what"])
    assert cut["next_step"] > 0.2  # nothing came through before the cut was healed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Nothing is not a job that can be disturbed. Write for example: hora chaos --kill 2"),
        (["--kill", "1", "--", "python", "x.py"], "python x.py is not a job that can be disturbed."),
        (["--", "hora", "run", "x.py"], "Nothing is to be done to the job."),
        (
            ["--kill", "1", "--", "hora", "run", "x.py"],
            "--kill ends the job, as nothing starts its ranks again.",
        ),
        (["--kill", "no", "--", "hora", "run", "x.py"], "--kill no: that is not a whole number."),
        (
            ["--disconnect", "1", "--", "hora", "run", "x.py"],
            "there is no connection to cut. Set HORA_ENGINE=gloo",
        ),
        (
            ["--kill", "1", "--", "hora", "run", "--checkpoints", "all", "x.py"],
            "With --checkpoints the disturbed run would find what the undisturbed one has left there.",
        ),
        (
            ["--delay", "1", "--at", "noon", "--", "hora", "run", "x.py"],
            "--at noon: there is no such moment.",
        ),
        (
            ["--delay", "1", "--tolerance", "2", "--", "hora", "run", "x.py"],
            "--tolerance 2: that is not between",
        ),
        (
            ["--delay", "1", "--", "hora", "run", "nowhere.py"],
            "The job fails undisturbed, with exit code 2. Make it run first; its output is in ",
        ),
    ],
)
def test_wrong_use_is_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HORA_ENGINE", "HORA_CHECKPOINTS", "HORA_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    assert cli.main(["chaos", *words]) == 2
    assert message in capsys.readouterr().err

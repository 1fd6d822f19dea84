"""The command, through the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.verify.conftest import SCRIPTS

from hora import cli

SOURCE = Path(__file__).parents[2] / "src"


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    return subprocess.run(
        [sys.executable, "-m", "hora", "verify", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HORA_DEVICE": "cpu"},
        timeout=90,
        check=False,
    )


def test_equal_is_exit_code_0(tmp_path: Path) -> None:
    done = verify(tmp_path, "--steps", "4", str(SCRIPTS / "hora_loader.py"))
    assert done.stdout.startswith("2 workers = 1 worker: 4 steps, largest relative difference ")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("verify-hora_loader-")
    assert json.loads((run / "verify.json").read_text())["equal"] is True
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0
    assert {path.name for path in (run / "jobs").iterdir()} == {"1-1-worker", "2-2-workers"}
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_different_is_exit_code_1_and_the_scripts_own_arguments_reach_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "same_samples.py").read_text()
    script.write_text("import sys\nassert sys.argv[1:] == ['--lr', '0.1']\n" + text)
    done = verify(tmp_path, "-n", "2", "--run-dir", "here", "script.py", "--lr", "0.1")
    assert done.returncode == 1, done.stderr
    assert "cause: sample order or overlap. Workers use the same samples" in done.stdout
    assert json.loads((tmp_path / "here" / "verify.json").read_text())["causes"][0]["name"] == "samples"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "1", "x.py"], "-n 1 compares one worker with itself. Write for example -n 2."),
        (["-n", "2", "--steps", "none", "x.py"], "--steps none: that is not a number of steps."),
        (["-n", "2", "x.py"], "The script x.py does not exist."),
        ([], "There is nothing to verify. Write for example: hora verify -n 2 train.py"),
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
    assert cli.main(["verify", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

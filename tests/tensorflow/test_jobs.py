"""Whole jobs of TensorFlow: importing it takes so long that each runs many cases."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")

LIMIT = 110.0


def run_job(
    workers: int, script: str, *arguments: str, folder: Path, flags: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run a script of this folder as a job; its exit code and what was written."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "hora", "run", "-n", str(workers), "--run-dir", str(folder / "run")),
            *("--timeout", str(LIMIT - 10), *flags, str(HERE / script), *arguments),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": SOURCE,
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        timeout=LIMIT,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_everything(tmp_path: Path) -> None:
    """Operations at 1, 2 and 3 ranks; trainings of 2 and 3 that end as one of 1 does."""
    trained = []
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        code, text = run_job(workers, "everything.py", str(folder / "trained.npz"), folder=folder)
        assert code == 0, text
        trained.append(np.load(folder / "trained.npz"))
    alone = trained[0]
    for several in trained[1:]:
        assert set(several.files) == set(alone.files)
        assert max(np.abs(several[name] - alone[name]).max() for name in alone.files) <= 1e-6


@pytest.mark.parametrize(
    ("act", "whose", "names"),
    [
        ("kill", 0, "rank 0 of 2 was killed by SIGKILL"),
        ("stop", 0, "rank 0"),
        ("raise", 1, "ArithmeticError: this rank has had enough"),
        ("mismatch", 1, "allreduce float32 (7,)"),
    ],
)
def test_a_rank_that_fails_ends_the_job(act: str, whose: int, names: str, tmp_path: Path) -> None:
    """Within 10 seconds, and what has happened is told, whichever rank it is and wherever the others are."""
    told = tmp_path / "told"
    flags = ("--stall-after", "2", "--stall-abort", "5")
    code, text = run_job(2, "failing.py", act, str(whose), str(told), folder=tmp_path, flags=flags)
    ended = time.time()
    assert code != 0
    assert names in text, text
    assert ended - float(told.read_text()) < 10.0, text


def test_horovods_interface(tmp_path: Path) -> None:
    code, text = run_job(3, "as_horovod.py", folder=tmp_path, flags=("--horovod",))
    assert code == 0, text


def test_the_runtimes_own_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What carries tensors between hosts does so on one, too."""
    monkeypatch.setenv("HORA_ENGINE", "gloo")
    code, text = run_job(2, "everything.py", str(tmp_path / "trained.npz"), folder=tmp_path)
    assert code == 0, text

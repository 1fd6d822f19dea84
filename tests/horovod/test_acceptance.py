"""Horovod's interface as its scripts use it: whole modules of tests, run by every rank of a real job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("module", ["operations", "optimizers", "breadth"])
def test_acceptance(module: str, workers: int, tmp_path: Path) -> None:
    pytest_flags = [
        "-q",
        "-x",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "hora", "run", "--horovod", "-np", str(workers)),
            *("--run-dir", str(tmp_path / "run"), "--timeout", "100"),
            *("-m", "pytest", *pytest_flags, str(HERE / "acceptance" / f"{module}.py")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "HORA_TIMEOUT": "30"},
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

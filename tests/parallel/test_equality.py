"""N workers are one worker, through the launchers that people use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "with_hora.py")
PYTHON = sys.executable
STEPS = 5 * (4096 // 96)


def losses(command: list[str], folder: Path) -> list[float]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environ = kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HORA_PROGRESS": "off"}
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    # Launchers put the rank in front of each line.
    found = re.findall(r"^(?:\[\w+\] ?)?(\d\.\d{6,}(?:e-\d+)?)$", done.stdout, flags=re.MULTILINE)
    assert len(found) == STEPS, done.stdout
    return [float(text) for text in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses([PYTHON, SCRIPT], tmp_path_factory.mktemp("alone"))


def hora_run(size: int) -> list[str]:
    return [PYTHON, "-m", "hora.cli", "run", "-n", str(size), "--run-dir", "run", SCRIPT]


def torchrun(size: int) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", SCRIPT]


@pytest.mark.parametrize(
    "command",
    [hora_run(1), hora_run(2), hora_run(4), torchrun(3)],
    ids=["hora run -n 1", "hora run -n 2", "hora run -n 4", "torchrun 3"],
)
def test_every_step_has_the_loss_of_one_worker(
    command: list[str], alone: list[float], tmp_path: Path
) -> None:
    found = losses(command, tmp_path)
    if command == hora_run(1):
        assert found == alone
    assert found == pytest.approx(alone, rel=1e-9, abs=1e-12)
    assert found[-1] < 0.1 * found[0]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_ranks_started_by_mpirun(alone: list[float], tmp_path: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and _is_open_mpi() else []
    found = losses(["mpirun", *root, "-n", "2", PYTHON, SCRIPT], tmp_path)
    assert found == pytest.approx(alone, rel=1e-9, abs=1e-12)


def _is_open_mpi() -> bool:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "Open MPI" in version.stdout

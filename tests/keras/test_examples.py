"""The pair of examples: both train, and the second one to the same losses with one worker and with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder that hides the other frameworks, which Keras imports where it finds them."""
    for name in ("tensorflow", "jax"):
        (tmp_path / f"{name}.py").write_text('raise ImportError("hidden by the test")')
    return tmp_path


def losses(folder: Path, *command: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ
        | {
            "KERAS_BACKEND": "torch",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
            "HORA_PROGRESS": "off",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    last = done.stdout.strip().splitlines()[-1]
    return [float(word) for word in last.removeprefix("[0] ").split()]


@pytest.mark.timeout(300)
def test_examples(alone: Path) -> None:
    plain, one = (
        losses(alone, str(ROOT / "examples" / name)) for name in ("keras_plain.py", "keras_with_hora.py")
    )
    two = losses(alone, "-m", "hora", "run", "-n", "2", str(ROOT / "examples" / "keras_with_hora.py"))
    assert two == pytest.approx(one, rel=1e-4)
    for found in (plain, one):
        assert found[1] < found[0] < 2.3  # validation after training; the loss of a guess is log 10

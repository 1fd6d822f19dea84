"""N workers are one worker: replicas bitwise equal, and within 1e-6 of one process on the union batch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.jax.jobs import ROOT, environment, run


@pytest.mark.parametrize("size", [2, 3])
def test_each_style_trains_what_one_process_trains(size: int, tmp_path: Path) -> None:
    ended = run(tmp_path, size, "training.py")
    assert ended.code == 0, ended.printed
    assert ended.printed.count("done") == size
    assert not ended.verdicts


def test_the_example_for_many_workers_gives_the_losses_of_one(tmp_path: Path) -> None:
    found = []
    for size in (1, 2):
        command = [sys.executable, "-m", "hora.cli", "run", "-n", str(size), "--run-dir", f"run-{size}"]
        done = subprocess.run(
            [*command, str(ROOT / "examples" / "jax_with_hora.py")],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(
            [float(text) for text in re.findall(r"^(?:\[0\] ?)?(\d+\.\d+)$", done.stdout, re.MULTILINE)]
        )
    assert len(found[0]) == 10_000 // 96
    # float32: what is rounded otherwise in one step grows in the next ones.
    assert found[1][:20] == pytest.approx(found[0][:20], rel=1e-6)
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0][-1] < 0.5 * found[0][0]

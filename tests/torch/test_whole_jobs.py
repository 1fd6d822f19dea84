"""What a person sees of a job that hangs, and of one whose script takes the guard's descriptors away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hora.core.rundir import RunDirectory
from hora.report import account

SOURCE = Path(__file__).parents[2] / "src"

HANGING = """
import time, torch
import hora.torch as hora

hora.init()
model = torch.nn.Linear(2, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
for step, (x,) in enumerate(hora.data_loader((torch.randn(40, 2),), global_batch=4)):
    if step == 3 and hora.rank() == 1:
        time.sleep(60)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""

REPLACING = """
import os
mine = os.open(f"mine-{os.environ['HORA_RANK']}", os.O_RDWR | os.O_CREAT)
os.write(mine, b"x" * 100_000)
os.dup2(mine, int(os.environ[TAKEN]))
import hora.torch as hora
hora.init()
"""


def run(folder: Path, script: str, *options: str) -> tuple[int, str, RunDirectory]:
    """Exit code, all that was printed, and the run directory."""
    (folder / "train.py").write_text(script)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hora.cli", "run", "-n", "2", "--run-dir", "run", *options, "train.py"]
    ended = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stdout, RunDirectory.open(folder / "run")


@pytest.mark.alone
def test_a_hanging_job_is_told_without_noise_and_its_timeline_says_who_waited(tmp_path: Path) -> None:
    code, printed, directory = run(tmp_path, HANGING, "--stall-after", "1", "--stall-abort", "2")
    assert code == 1
    assert printed.count("A rank keeps the others waiting.") == 1
    assert "in <module> (train.py:11)" in printed
    assert "c10d" not in printed  # the log lines that PyTorch's store writes when it is cut off
    assert "frame #" not in printed
    waiting, sleeping = (account(directory).ranks[rank] for rank in (0, 1))
    assert 1.5 < waiting.communication < 2.9
    assert sleeping.data_seen  # its events were written, though it was killed in its sleep
    assert sleeping.communication < 1


@pytest.mark.parametrize("taken", ["HORA_GUARD_BOARD", "HORA_GUARD_FD"])
def test_a_script_that_replaces_the_guards_descriptors_keeps_its_file_and_is_told(
    tmp_path: Path, taken: str
) -> None:
    code, printed, _ = run(tmp_path, REPLACING.replace("TAKEN", repr(taken)))
    assert code == 1
    assert "the script has closed or replaced descriptors" in printed
    for rank in range(2):
        assert (tmp_path / f"mine-{rank}").read_bytes() == b"x" * 100_000

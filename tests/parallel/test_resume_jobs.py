"""One training through everything that can happen to it: a killed rank, a restart, a preemption, another run.

Real programs, so it takes longer than ten seconds on a busy host: what is tested is that the launcher, the
signals, the loader processes and the checkpoints of separate processes fit together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_ranks

SCRIPT = '''
import os, signal, sys, time
from pathlib import Path
import torch
import hora.torch as hora

class Points(torch.utils.data.Dataset):
    def __len__(self): return 26
    def __getitem__(self, index): return index, torch.rand(3, dtype=torch.float64)

def everybody(number):
    """As Slurm does it: the launcher, the ranks, and the loader processes of this one."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for pid in (*map(int, children), os.getppid()):
        os.kill(pid, number)

def train(folder=None, fault=lambda step: None):
    torch.manual_seed(hora.rank())
    loader = hora.data_loader(Points(), global_batch=4, seed=3, num_workers=2, persistent_workers=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
    ).double()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    hora.broadcast_parameters(model)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = hora.Checkpoints(state, every=3, directory=folder)
    checkpoints.restore()
    made = []
    progress = hora.track(loader, epochs=2)
    for indices, x in progress:
        fault(progress.step)
        optimizer.zero_grad()
        error = model(x).square().mean()
        error.backward()
        optimizer.step()
        seen = hora.allgather_object(indices.tolist())
        loss = hora.mean(error)
        progress.log(loss=loss, seen=seen)
        made.append([progress.step, loss, seen])
        checkpoints.step()
    return made

def fault(step):
    if os.environ.get("FAULTS") and hora.rank() == 1:
        if step == 8 and os.environ["HORA_ATTEMPT"] == "1":
            marker = Path(os.environ["HORA_RUN_DIR"], "checkpoints", "step-00000006", "commit.json")
            while not marker.exists():  # rank 0 writes it in the background; the job has a time limit
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 10:
            everybody(signal.SIGTERM)

if __name__ == "__main__":
    hora.init()
    train(fault=fault)
    hora.shutdown()
'''


def logged(run: Path) -> list[Any]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [[record["step"], record["loss"], record["seen"]] for record in map(json.loads, lines)]


@pytest.mark.timeout(300)
def test_a_training_through_everything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    names: dict[str, Any] = {"__name__": "reference"}
    exec(compile(SCRIPT, "train.py", "exec"), names)
    (whole, _) = run_ranks(2, lambda: names["train"](tmp_path / "whole"))
    assert len(whole) == 12

    environment = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}

    def job(run: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hora.cli", "run", "-n", "2", "--run-dir", run, *options, "train.py"]
        env = environment | variables
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=140, check=False
        )

    first = job("first", "--restarts", "2", FAULTS="yes")
    assert first.returncode == 75, first.stderr
    assert "rank 1 of 2 failed" in first.stderr
    assert "SIGKILL" in first.stderr
    assert "hora: restart 1 of 2, from the checkpoint of step 6" in first.stderr
    assert "hora: stopped by SIGTERM after step 11; the checkpoint of step 11 is saved." in first.stderr
    about = json.loads((tmp_path / "first" / "run.json").read_text())
    assert [(one["exit_code"], one["saved"]) for one in about["attempts"]] == [(137, 6), (75, 11)]

    # That each rank has its own statistics in the midst of a training is no finding.
    verdicts = (tmp_path / "first" / "verdicts.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in verdicts] == ["plan", "rank-failed", "plan"]

    second = job("second", "--resume", "first")
    assert second.returncode == 0, second.stderr
    # No step twice, none left out, and each to the last digits: the steps 7 and 8 were made again.
    made = logged(tmp_path / "first") + logged(tmp_path / "second")
    assert [(step, seen) for step, _, seen in made] == [(step, seen) for step, _, seen in whole]
    assert [loss for _, loss, _ in made] == pytest.approx([loss for _, loss, _ in whole], rel=1e-12, abs=0)

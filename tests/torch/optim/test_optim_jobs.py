"""What the guard says of workers that step by themselves on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"

LOCAL = """
import torch, hora.torch as hora
from hora.torch.optim import PostLocalSGD

hora.init()
model = torch.nn.Linear(2, 1)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
local = PostLocalSGD(optimizer, start=3, period=10)
for epoch in range(4):
    for (x,) in hora.data_loader((torch.randn(80, 2),), global_batch=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if local.steps == 71 and hora.rank() == 1:
            assert local.apart
            model.weight.data.fill_(float("nan"))
"""


def test_replicas_that_part_on_purpose_are_no_verdict_and_nan_still_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOCAL)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hora.cli", "run", "-n", "2", "--run-dir", "run", "train.py"]
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()
    kinds = {verdict["kind"] for verdict in map(json.loads, lines)}
    assert "diverged" not in kinds
    assert "not-finite" in kinds

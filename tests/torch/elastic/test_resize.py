"""What a change of the workers leaves as it is: losses, random numbers, a spread optimizer, rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.elastic.jobs import Job

TRAINING = """
import json, os, random, signal, sys
from pathlib import Path

import numpy, torch

import hora.torch as hora

folder, dropout, victim = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
hora.init()
torch.manual_seed(0)
x = torch.randn(256, 4, dtype=torch.float64)
y = x @ torch.randn(4, 1, dtype=torch.float64)
loader = hora.data_loader((x, y), global_batch=64, micro_batch=9, seed=1)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
).double()
optimizer = hora.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.05), model, shard="optimizer"
)
hora.broadcast_parameters(model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
torch.manual_seed(1 + hora.rank())
numpy.random.seed(1 + hora.rank())
random.seed(1 + hora.rank())
state = hora.elastic.TorchState(
    model=model, optimizer=optimizer, loader=loader, schedule=schedule, losses=[], drawn=[]
)

@hora.elastic.run
def train(state):
    for batch in hora.track(loader, epochs=4):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in batch:
            assert len(x) <= 9
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            total += loss.detach() * len(x) / 64
        if os.environ["HORA_WORKER"] == victim and len(state.losses) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        schedule.step()
        state.losses.append(hora.allreduce(total, op=hora.Sum).item())
        drawn = [numpy.random.rand(), numpy.random.randn(), random.random(), random.gauss(0, 1)]
        state.drawn.append(hora.allgather(torch.tensor([drawn])).tolist())
        if len(state.losses) % 2 == 0:
            state.commit()

train(state)
if hora.rank() == 0:
    weights = [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]
    (folder / "result.json").write_text(json.dumps([state.losses, weights, state.drawn]))
"""


def run(folder: Path, dropout: float, *options: str, undisturbed: bool = False) -> tuple[Any, list[Any], str]:
    folder.mkdir()
    with Job(folder, TRAINING, dropout, "none" if undisturbed else "1", options=options) as job:
        output = job.wait()
        return json.loads((folder / "result.json").read_text()), job.worlds(), output


def test_who_takes_a_dead_workers_place_goes_on_with_its_numbers_and_share(tmp_path: Path) -> None:
    """Three workers always, dropout, a spread AdamW: losses are those of a job that nothing happened to."""
    options = ("--min-workers", "3", "-n", "3")
    calm, worlds, _ = run(tmp_path / "calm", 0.3, *options, undisturbed=True)
    assert len(worlds) == 1
    killed, worlds, output = run(tmp_path / "killed", 0.3, *options)
    assert [world["workers"] for world in worlds] == [[0, 1, 2], [0, 2, 3]]
    assert worlds[1]["repeats"] == 1
    assert killed[0] == pytest.approx(calm[0], rel=1e-12)
    assert killed[1] == pytest.approx(calm[1], rel=1e-12, abs=1e-14)
    assert killed[2] == calm[2], "another stream of random numbers"
    told = "hora: 3 workers: global batch 64 and learning rate are kept; 21 or 22 samples each, weighted by "
    assert output.count(told + "their numbers, in micro-batches of at most 9") == 2


def test_fewer_workers_and_more_again_change_no_loss(tmp_path: Path) -> None:
    calm, _, _ = run(tmp_path / "calm", 0.0, "--min-workers", "1", "-n", "1", undisturbed=True)
    killed, worlds, _ = run(tmp_path / "killed", 0.0, "--min-workers", "1", "-n", "2")
    assert worlds[1]["workers"] == [0]
    assert killed[0] == pytest.approx(calm[0], rel=1e-9)
    assert killed[1] == pytest.approx(calm[1], rel=1e-9, abs=1e-12)


SCALED = """
import json, os, signal, sys
from pathlib import Path

import torch

import hora.torch as hora

folder = Path(sys.argv[1])
hora.init()
x = torch.linspace(-1, 1, 600, dtype=torch.float64)[:, None]
y = torch.sin(3 * x)
loader = hora.data_loader((x, y), global_batch=6 * hora.size(), shuffle=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hora.size(), momentum=0.9)
optimizer = hora.DistributedOptimizer(optimizer, model)
hora.broadcast_parameters(model)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1 * hora.size(), total_steps=40)
state = hora.elastic.TorchState(
    model=model, optimizer=optimizer, loader=loader, schedule=schedule, resize="scale", sizes=[]
)

@hora.elastic.run
def train(state):
    tracker = hora.track(loader)
    for x, y in tracker:
        optimizer.zero_grad()
        assert len(x) == 6
        torch.nn.functional.mse_loss(model(x), y).backward()
        if os.environ["HORA_WORKER"] == "1" and len(state.sizes) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        schedule.step()
        state.sizes.append(hora.size())
        assert tracker.step == len(state.sizes), (tracker.step, state.sizes)
        assert state.lr_factor == hora.size() / 3
        state.commit()
        if len(state.sizes) == 30:
            return

train(state)
if hora.rank() == 0:
    weights = [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]
    (folder / "result.json").write_text(json.dumps([state.sizes, weights]))
"""


def test_scale_keeps_each_workers_batch_and_scales_what_the_schedule_says(tmp_path: Path) -> None:
    with Job(tmp_path, SCALED, options=("--min-workers", "1", "-n", "3")) as job:
        output = job.wait()
    sizes, weights = json.loads((tmp_path / "result.json").read_text())
    assert sizes[:6] == [3, 3, 3, 3, 3, 2]
    assert (
        "hora: 3 workers: 6 samples each, global batch 18; the learning rate is that of the script" in output
    )
    text = "hora: 2 workers: 6 samples each, global batch 12; learning rate times 0.666667, as it was set for"
    assert f"{text} 3 workers" in output

    x = torch.linspace(-1, 1, 600, dtype=torch.float64)[:, None]
    y = torch.sin(3 * x)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=40)
    start = 0
    for size in sizes:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(
            model(x[start : start + 6 * size]), y[start : start + 6 * size]
        ).backward()
        start += 6 * size
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * size / 3
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        schedule.step()
    wanted = [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]
    assert weights == pytest.approx(wanted, rel=1e-9, abs=1e-12)

"""Whole elastic jobs with torch. Each worker imports it, which takes most of the time of these tests."""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.torch.elastic.jobs import LIMIT, Job, environment, until

EPOCHS = 20

TRAINING = """
import json, os, signal, sys, time
from pathlib import Path

import torch

import hora.torch as hora

folder, epochs, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
hora.init()
torch.manual_seed(0)
x = torch.randn(256, 4, dtype=torch.float64)
y = x @ torch.randn(4, 1, dtype=torch.float64)
loader = hora.data_loader((x, y, torch.arange(256)), global_batch=64, seed=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
hora.broadcast_parameters(model)
state = hora.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, seen=[])

@hora.elastic.run
def train(state):
    for x, y, samples in hora.track(loader, epochs=epochs):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        state.seen.append(hora.allgather(samples).tolist())
        time.sleep(pause)
        if len(state.seen) % 2 == 0:
            state.commit()
        (folder / "goes").touch()

train(state)
if hora.rank() == 0:
    weights = [float(each) for parameter in model.parameters() for each in parameter.detach().flatten()]
    (folder / "result.json").write_text(json.dumps([state.seen, weights]))
"""

RESETS = """
import os, sys, threading
from pathlib import Path

import torch

import hora.torch as hora

folder, count = Path(sys.argv[1]), int(sys.argv[2])
hora.init()
x = torch.randn(64, 4)
model = torch.nn.Linear(4, 300_000)  # a gradient that lies in the engine's own memory
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
state = hora.elastic.TorchState(model=model, optimizer=optimizer, worlds=0)
lines = []

def traces():
    memory = Path("/proc/self/maps").read_text().count("memfd:hora")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), memory

@hora.elastic.run
def train(state):
    while True:
        optimizer.zero_grad()
        model(x[:2]).sum().backward()
        optimizer.step()
        control = hora.context().member.control
        assert control.number <= state.worlds, "both workers were lost"
        if state.worlds == control.number:
            lines.append(traces())
            state.worlds += 1
            state.commit()
            if state.worlds == count:
                return
            if hora.rank() == 0:  # as a worker does that has lost its connections
                control.tell("broken", number=control.number, reason="a test")

train(state)
(folder / f"traces-{hora.rank()}").write_text(repr(lines))
"""


def undisturbed(folder: Path, epochs: int) -> Any:
    """What one worker without a launcher trains, in a fork of this process."""
    folder.mkdir(exist_ok=True)
    run_ranks(1, _alone, str(folder), str(epochs), init=False)
    return json.loads((folder / "result.json").read_text())


def _alone(world: object, settings: object, folder: str, epochs: str) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", folder, epochs, "0"]
    Path("train.py").write_text(TRAINING)
    runpy.run_path("train.py", run_name="__main__")


def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """Three workers, whose shares of 64 samples are uneven; two SIGKILLs on a seeded schedule."""
    (tmp_path / "elastic").mkdir()
    seen, weights = undisturbed(tmp_path / "plain", EPOCHS)
    moments = random.Random(5)
    with Job(tmp_path / "elastic", TRAINING, EPOCHS, 0.05, options=("--min-workers", "1", "-n", "3")) as job:
        kills = 0
        deadline = time.monotonic() + LIMIT
        while job.process.poll() is None and kills < 2 and time.monotonic() < deadline:
            workers = job.processes(b"_worker.py")
            if (job.folder / "goes").exists() and len(workers) > 1:
                victim = moments.choice(sorted(workers))
                os.kill(victim, signal.SIGKILL)
                kills += 1
            time.sleep(moments.uniform(0.1, 1.5))
        job.wait()
    assert kills == 2
    ours, theirs = json.loads((tmp_path / "elastic" / "result.json").read_text()), (seen, weights)
    assert _digest(ours[0]) == _digest(theirs[0]), "samples were lost, repeated, or in another order"
    assert len(ours[0]) == EPOCHS * 4
    # The sums of a step are in another order where the number of workers is another.
    assert all(abs(mine - other) <= 1e-9 for mine, other in zip(ours[1], weights, strict=True))


def test_all_hosts_are_replaced_and_no_commit_is_lost(tmp_path: Path) -> None:
    """The program names host x, then y alone: x stays until y's worker has the state, and then leaves."""
    hosts, program = tmp_path / "hosts", tmp_path / "hosts.sh"
    hosts.write_text("x:1\n")
    program.write_text(f"#!/bin/sh\ncat {hosts}\n")
    program.chmod(0o755)
    shell = ("--remote-shell", "env HOST={host}", "--network", "lo")
    options = ("--hosts-from", str(program), "--min-workers", "1", "--max-workers", "1", *shell)
    with Job(tmp_path, TRAINING, 1000, 0.02, options=options) as job:
        until((tmp_path / "goes").exists)
        hosts.write_text("y:1\n")
        until(lambda: job.worlds() and job.worlds()[-1]["hosts"] == ["y"])
        worlds = job.worlds()
        output = (tmp_path / "output").read_text()
    assert [world["hosts"] for world in worlds] == [["x"], ["x", "y"], ["y"]]
    commits = [world["commits"] for world in worlds]
    assert 0 < commits[1] < commits[2]
    assert "from the beginning" not in output
    assert "worker 0 leaves: x has no place for it now" in output


def test_resets_leave_no_descriptor_thread_or_memory(tmp_path: Path) -> None:
    count = 15
    with Job(tmp_path, RESETS, count, options=("--min-workers", "2", "-n", "2")) as job:
        job.wait()
        assert len(job.worlds()) == count
        assert {tuple(world["workers"]) for world in job.worlds()} == {(0, 1)}
    for rank in (0, 1):
        lines = eval((tmp_path / f"traces-{rank}").read_text())
        assert len(lines) == count
        # The first worlds load what is loaded once. A world's engine may live until the next has begun, so
        # that one count may be higher; what leaks stays, and the least of the last counts shows it.
        early = [max(values) for values in zip(*lines[3:6], strict=True)]
        late = [min(values) for values in zip(*lines[-3:], strict=True)]
        assert all(mine <= other for mine, other in zip(late, early, strict=True)), lines


HANG = """
import os, signal

original = torch.nn.functional.mse_loss

def mse_loss(*arguments):  # the second worker hangs in its 6th step, while the others wait in a collective
    if os.environ["HORA_WORKER"] == "1" and len(state.seen) == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*arguments)

torch.nn.functional.mse_loss = mse_loss

@hora.elastic.run
"""


def test_a_rank_that_hangs_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    script = TRAINING.replace("\n@hora.elastic.run\n", HANG)
    options = ("--min-workers", "1", "-n", "3", "--stall-after", "1", "--stall-abort", "2")
    with Job(tmp_path, script, 3, 0.01, options=options) as job:
        output = job.wait()
        worlds = job.worlds()
    assert worlds[0]["workers"] == [0, 1, 2]
    assert worlds[1]["workers"] == [0, 2], output
    # Two steps belong to a commit, and the sixth was under way: one is made again.
    assert (worlds[1]["commits"], worlds[1]["repeats"]) == (2, 1)
    assert "A late rank is replaced after 2 s (--stall-abort)." in " ".join(output.split())
    assert "The job is stopped" not in output
    assert "worker 1 (rank 1) has failed: SIGKILL" in output
    seen, _ = json.loads((tmp_path / "result.json").read_text())
    assert len(seen) == 3 * 4


SAVED = (
    TRAINING.replace(
        "state = hora.elastic.TorchState(",
        """parts = {"model": model, "optimizer": optimizer, "loader": loader}
checkpoints = hora.Checkpoints(parts, every=3, directory=folder / "checkpoints")
checkpoints.restore()
state = hora.elastic.TorchState(checkpoints=checkpoints, """,
    )
    .replace("        if len(state.seen)", "        checkpoints.step()\n        if len(state.seen)")
    .replace("[state.seen, weights]", "[checkpoints.steps, weights]")
)


def test_a_signal_saves_after_a_reset_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """A worker is killed, its replacement taken in, the job stopped, and begun anew: as if undisturbed."""
    (tmp_path / "elastic").mkdir()
    _, weights = undisturbed(tmp_path / "plain", EPOCHS)
    folder = tmp_path / "elastic"
    options = ("--min-workers", "1", "-n", "2")
    with Job(folder, SAVED, 1000, 0.05, options=options) as job:
        until((folder / "goes").exists)
        os.kill(min(job.processes(b"_worker.py")), signal.SIGKILL)
        until(lambda: len(job.worlds()) == 3)
        saved = set((folder / "checkpoints").glob("*/commit.json"))
        until(lambda: set((folder / "checkpoints").glob("*/commit.json")) - saved)
        job.process.send_signal(signal.SIGUSR1)
        assert job.process.wait(LIMIT) == 75
        output = (folder / "output").read_text()
        assert "the checkpoint of step" in output, output
        assert not job.processes(), "a process is left"
        assert [len(world["workers"]) for world in job.worlds()] == [2, 1, 2]
    stopped = int(output.split("after step ")[1].split(";")[0])
    assert stopped == max(
        int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoints/*/commit.json")
    )
    epochs = max(EPOCHS, stopped // 4 + 2)
    if epochs > EPOCHS:
        _, weights = undisturbed(tmp_path / "plain", epochs)
    with Job(
        folder, SAVED, epochs, 0, options=("--min-workers", "1", "-n", "2", "--run-dir", "again")
    ) as job:
        job.wait()
    steps, ours = json.loads((folder / "result.json").read_text())
    assert steps == epochs * 4
    assert all(abs(mine - other) <= 1e-9 for mine, other in zip(ours, weights, strict=True))


def test_when_all_workers_die_the_job_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """Both are killed in one moment: those that are started in their place find what is on the disk."""
    folder = tmp_path / "elastic"
    folder.mkdir()
    _, weights = undisturbed(tmp_path / "plain", EPOCHS)
    # They say where they begin; and who comes first trains as little as it can before the other is there.
    script = SAVED.replace("checkpoints.restore()", 'print("begins at", checkpoints.restore(), flush=True)')
    with Job(folder, script, EPOCHS, 0.05, options=("--min-workers", "2", "-n", "2")) as job:
        until(lambda: list(folder.glob("checkpoints/*/commit.json")))
        for worker in job.processes(b"_worker.py"):
            os.kill(worker, signal.SIGKILL)
        output = job.wait()
        assert [world["workers"] for world in job.worlds()] == [[0, 1], [2, 3]]
    begun = [line.split()[-1] for line in output.splitlines() if "begins at" in line]
    assert begun[:2] == ["None", "None"]
    assert begun[2] == begun[3] != "None", output
    assert int(begun[2]) % 3 == 0
    steps, ours = json.loads((folder / "result.json").read_text())
    assert steps == EPOCHS * 4
    assert all(abs(mine - other) <= 1e-9 for mine, other in zip(ours, weights, strict=True))


def test_a_signal_without_checkpoints_is_told_plainly(tmp_path: Path) -> None:
    with Job(tmp_path, TRAINING, 1000, 0.02, options=("--min-workers", "1", "-n", "2")) as job:
        until((tmp_path / "goes").exists)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(LIMIT) == 75
        output = (tmp_path / "output").read_text()
        assert "stopped by SIGTERM, without a checkpoint: what was committed was in memory" in output
        assert not job.processes(), "a process is left"


def test_a_spread_model_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    script = TRAINING.replace(", model)", ', model, shard="all")')
    with Job(tmp_path, script, 1, 0, options=("--min-workers", "2", "-n", "2")) as job:
        assert job.process.wait(LIMIT) == 1
        output = " ".join((tmp_path / "output").read_text().split())
        assert "Write shard='optimizer', whose commits hold all" in output, output


STREAMS = """
import random

import numpy, torch

import hora.torch as hora

def drawn():
    return torch.rand(2).tolist(), numpy.random.rand(), random.random()

hora.init()
state = hora.elastic.TorchState(model=torch.nn.Linear(1, 1))
for _ in range(2):
    drawn()
    state.commit()
    first = drawn()
    assert first != drawn()
    state.restore()
    assert drawn() == first
"""


def test_a_step_that_is_repeated_draws_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STREAMS)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment(), check=True, timeout=LIMIT)


def _digest(seen: Any) -> str:
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


DYING = """
import os, signal
import hora.torch._rendezvous as rendezvous

class Dying(rendezvous.TCPStore):  # rank 0 of the second world dies before it serves the store
    def __init__(self, *arguments, is_master, **options):
        if is_master and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*arguments, is_master=is_master, **options)

rendezvous.TCPStore = Dying

@hora.elastic.run
"""


def test_rank_0_dies_before_the_others_have_found_it(tmp_path: Path) -> None:
    script = TRAINING.replace("\n@hora.elastic.run\n", DYING)
    with Job(tmp_path, script, 20, 0.05, options=("--min-workers", "1", "-n", "3")) as job:
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "goes").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(job.processes(b"rank-2.json")[0], signal.SIGKILL)
        job.wait()
        worlds = [world["workers"] for world in job.worlds()]
    assert worlds[:2] == [[0, 1, 2], [0, 1]]
    assert worlds[2:], "rank 0 has not died"
    assert [workers for workers in worlds[2:] if 0 in workers] == []
    seen, _ = json.loads((tmp_path / "result.json").read_text())
    assert len(seen) == 20 * 4

"""How long the survivors of an elastic job take from a rank's death to their next completed step.

The model and the batches of the ResNet workload train on ``--workers`` workers; the last one kills itself by
SIGKILL after some steps, again and again in new jobs. Prints the distribution, and writes it as JSON::

    python benchmarks/elastic_recovery.py --kills 5 --json recovery.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch

import hora.torch as hora
from hora.workloads.resnet.config import ModelConfig
from hora.workloads.resnet.model import ResNet

folder, kill_rank, kill_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
hora.init()
torch.manual_seed(0)
images, labels = torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,))
loader = hora.data_loader((images, labels), global_batch=64, seed=1)
model = ResNet(ModelConfig())
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
hora.broadcast_parameters(model)
state = hora.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0)

@hora.elastic.run
def train(state):
    for x, y in hora.track(loader, epochs=100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if (folder / "death").exists() and state.step >= kill_step:
            (folder / f"alive-{hora.rank()}").write_text(repr(time.time()))
            return
        state.step += 1
        state.commit()
        if state.step == kill_step and hora.rank() == kill_rank:
            (folder / "death").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps until the kill")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = []
    for number in range(arguments.kills):
        # By turns the rank that gives its state to the others, and the last one.
        rank = 0 if number % 2 else arguments.workers - 1
        seconds.append(_measure(arguments.workers, rank, arguments.steps))
        print(f"rank {rank} killed: the next step was complete after {seconds[-1]:.2f} s", flush=True)
    ordered = sorted(seconds)
    result = {
        "workers": arguments.workers,
        "seconds": seconds,
        "median": statistics.median(ordered),
        "worst": ordered[-1],
        "best": ordered[0],
    }
    print(
        f"{len(seconds)} kills: median {result['median']:.2f} s, {ordered[0]:.2f} to {ordered[-1]:.2f} s "
        "from the death to the survivors' next complete step"
    )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _measure(workers: int, rank: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "hora", "run", "--min-workers", "1", "-n", str(workers)]
        command += ["--quiet", "--run-dir", str(folder / "run"), str(folder / "train.py")]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HORA_PROGRESS": "off"}
        subprocess.run([*command, name, str(rank), str(steps)], env=environ, check=True, timeout=300)
        death = float((folder / "death").read_text())
        return max(float(path.read_text()) for path in folder.glob("alive-*")) - death


if __name__ == "__main__":
    main()

"""Does a profile of one worker tell the step of two? `hora plan --profile` against what happens.

    python benchmarks/plan_profile.py [--rounds 3] [--steps 40]

The small ResNet and a transformer train on one worker and on two, each worker with one thread and with the
same global batch, as jobs of their own that take turns. Each round predicts from its own run on one worker.
The bar is 15 % for the median of the rounds.
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

BAR = 0.15
MODELS = ("resnet", "transformer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.steps)
        return 0
    worst = 0.0
    for name in MODELS:
        rounds = [compare(name, given.steps) for _ in range(given.rounds)]
        errors = [predicted / measured - 1 for predicted, measured in rounds]
        middle = statistics.median(errors)
        worst = max(worst, abs(middle))
        for (predicted, measured), error in zip(rounds, errors, strict=True):
            print(
                f"{name}: predicted {1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms: {error:+.1%}"
            )
        print(f"{name}: median error {middle:+.1%} (bar {BAR:.0%})")
    return 0 if worst <= BAR else 1


def compare(name: str, steps: int) -> tuple[float, float]:
    """Predicted and measured seconds of a step on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = (run(name, steps, workers, Path(folder)) for workers in (1, 2))
        words = [sys.executable, "-m", "hora.cli", "plan", "--profile", str(one), "--gpus", "2"]
        words += ["--batch", str(batch_of(one)), "--json"]
        answer = subprocess.run(words, check=True, capture_output=True, text=True)
        return json.loads(answer.stdout)["step"]["value"], statistics.median(steps_of(two))


def run(name: str, steps: int, workers: int, folder: Path) -> Path:
    path = folder / f"{name}-{workers}"
    words = [sys.executable, "-m", "hora.cli", "run", "-n", str(workers), "--run-dir", str(path), __file__]
    words += ["--train", name, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, capture_output=True, env=environment)
    return path


def _events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "events" / "rank-0.jsonl").read_text().splitlines()]


def steps_of(path: Path) -> list[float]:
    found = [float(e["stop"]) - float(e["start"]) for e in _events(path) if e["lane"] == "steps"]  # type: ignore[arg-type]
    return found[len(found) // 5 :]


def batch_of(path: Path) -> int:
    plan = next(event["args"] for event in _events(path) if event["name"] == "plan")
    assert isinstance(plan, dict)
    return int(plan["global_batch"])


def train(name: str, steps: int) -> None:
    import torch
    from torch.utils.data import TensorDataset

    import hora.torch as hora
    from _models import MODELS as KNOWN

    hora.init()
    torch.manual_seed(1)
    kind = KNOWN[name]
    model = kind.make()
    batch = 64 if name == "resnet" else 16
    generator = torch.Generator().manual_seed(1)
    pieces = [kind.batch(generator) for _ in range(64)]
    inputs, labels = (torch.cat([piece[part] for piece in pieces]) for part in (0, 1))
    count = min(len(inputs), batch * steps) // batch * batch
    data = TensorDataset(inputs[:count], labels[:count])
    loader = hora.data_loader(data, global_batch=batch, seed=1)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hora.broadcast_parameters(model)
    epochs = -(-steps * batch // count)
    for x, y in hora.track(loader, epochs=epochs):
        optimizer.zero_grad()
        kind.loss(model, (x, y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    raise SystemExit(main())

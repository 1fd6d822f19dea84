"""Does a profile of one worker tell the step of two? `hora plan --profile` against what happens.

    python benchmarks/plan_profile.py [--rounds 3] [--steps 30] [--models resnet transformer]

The small ResNet and a transformer train on one worker and on two, each worker with one thread, as jobs of
their own that take turns: on two workers once with the same samples per worker, and once with the same
global batch. Each round predicts from its own run on one worker. The bar is 15 % for the median of the
rounds of each. Run it on an idle host: what else runs slows two workers more than one.
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
BATCH = {"resnet": 64, "transformer": 8}
"""Samples of a step on one worker."""
MODELS = tuple(BATCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.steps, given.batch)
        return 0
    errors: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for name in given.models:
            for what, predicted, measured in compare(name, given.steps):
                error = predicted / measured - 1
                errors.setdefault(what, []).append(error)
                print(
                    f"{what}: predicted {1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms: "
                    f"{error:+.1%} (load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
    medians = {what: statistics.median(some) for what, some in errors.items()}
    for what, some in errors.items():
        print(
            f"{what}: median error {medians[what]:+.1%}, {min(some):+.1%} to {max(some):+.1%} (bar {BAR:.0%})"
        )
    return 0 if max(map(abs, medians.values())) <= BAR else 1


def compare(name: str, steps: int) -> list[tuple[str, float, float]]:
    """What runs on two workers, and its predicted and measured seconds of a step."""
    each = BATCH[name]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        one = run(name, steps, 1, each, Path(folder))
        for kept, batch in (("per worker", 2 * each), ("in all", each)):
            words = [sys.executable, "-m", "hora.cli", "plan", "--profile", str(one), "--gpus", "2"]
            words += ["--batch", str(batch), "--json"]
            answer = subprocess.run(words, check=True, capture_output=True, text=True)
            two = run(name, steps, 2, batch, Path(folder))
            predicted = json.loads(answer.stdout)["step"]["value"]
            found.append((f"{name}, {each} samples {kept}", predicted, statistics.median(steps_of(two))))
    return found


def run(name: str, steps: int, workers: int, batch: int, folder: Path) -> Path:
    path = folder / f"{name}-{workers}-{batch}"
    words = [sys.executable, "-m", "hora.cli", "run", "-n", str(workers), "--run-dir", str(path), __file__]
    words += ["--train", name, "--steps", str(steps), "--batch", str(batch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, capture_output=True, env=environment)
    return path


def steps_of(path: Path) -> list[float]:
    """Seconds of the steady steps on rank 0."""
    lines = (path / "events" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    found = [event["stop"] - event["start"] for event in events if event["lane"] == "steps"]
    return found[len(found) // 5 :]


def train(name: str, steps: int, batch: int) -> None:
    import torch
    from torch.utils.data import TensorDataset

    import hora.torch as hora
    from _models import MODELS as KNOWN

    hora.init()
    torch.manual_seed(1)
    kind = KNOWN[name]
    model = kind.make()
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

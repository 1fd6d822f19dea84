"""What the guard costs: times of a step with it and without, in turn, on one rank of two.

    python benchmarks/guard_cost.py [--rounds 15] [--steps 50] [--ranks 2]

Three trainings are measured, on synthetic data: the small ResNet of the workload, a small transformer, and
the same on so few tokens that a step is mostly overhead.
Each job of ``hora run`` switches the guard off and on in turn, over as many steps as lie between two
fingerprints, and compares rounds that lie next to each other. CPU seconds of rank 0 are compared, so that
other work on the machine disturbs little. A ratio of 1.01 means 1 % of the step's time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional as F

import hora.torch as hora

Step = Callable[[], None]
MODELS = ("resnet", "transformer", "tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS)
    arguments = parser.parse_args()
    if "HORA_RANK" in os.environ:
        measure(arguments.model, rounds=arguments.rounds, steps=arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            command = [sys.executable, "-m", "hora", "run", "-n", str(arguments.ranks)]
            command += ["--run-dir", f"{folder}/{model}", __file__, "--model", model]
            command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print("\n".join(line for line in done.stdout.splitlines() if "per step" in line), flush=True)


def measure(model: str, *, rounds: int, steps: int) -> None:
    """Print the ratio of the times per step with the guard's checks and without."""
    hora.init()
    torch.manual_seed(1)
    step = {"resnet": resnet, "transformer": transformer, "tiny": tiny}[model]()
    switch = Switch()
    for _ in range(2 * steps):  # past the first steps, in which more is looked at
        step()
    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(2 * rounds):
        on = index % 4 in (0, 3)
        switch(on)
        hora.barrier()
        start = time.process_time()
        for _ in range(steps):
            step()
        times[on].append((time.process_time() - start) / steps)
    switch(True)
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    if hora.rank() == 0:
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{model:12} {1000 * statistics.median(times[False]):8.2f} ms per step without, "
            f"with: x {statistics.median(ratios):.4f} (quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}); "
            f"of the best rounds x {min(times[True]) / min(times[False]):.4f}",
            flush=True,
        )


class Switch:
    """Turns the guard off and on again: its looks at collectives, and its checks of the training."""

    def __init__(self) -> None:
        from hora.torch import _context

        self._context = _context.context()
        guard, watch = self._context.guard, self._context.watch
        if guard is None or watch is None:
            raise SystemExit("There is no guard here: write hora run, without HORA_GUARD=off.")
        self._guard, self._watch = guard, watch

    def __call__(self, on: bool) -> None:
        self._context.guard = self._guard if on else None
        self._watch.broken = not on


def resnet() -> Step:
    from hora.torch.optim import decay_groups
    from hora.workloads.resnet.config import SMALL
    from hora.workloads.resnet.model import ResNet

    model = ResNet(SMALL)
    groups = [
        {key: value for key, value in group.items() if key != "trust"}
        for group in decay_groups(model, weight_decay=4e-4)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)
    optimizer = hora.DistributedOptimizer(optimizer, model)
    hora.broadcast_parameters(model)
    generator = torch.Generator().manual_seed(hora.rank())
    images = torch.randn(32, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def tiny() -> Step:
    """The transformer on so few tokens that a step is mostly overhead: the worst case for the guard."""
    return transformer(batch=8, tokens=32)


def transformer(*, batch: int = 16, tokens: int = 64) -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(1000, 128),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(128, 1000),
    )
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    hora.broadcast_parameters(model)
    generator = torch.Generator().manual_seed(hora.rank())
    text = torch.randint(1000, (batch, tokens + 1), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

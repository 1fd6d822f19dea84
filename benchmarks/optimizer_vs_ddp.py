"""Overhead of DistributedOptimizer against PyTorch DDP: forward, backward and step, two ranks of one thread.

    python benchmarks/optimizer_vs_ddp.py [--rounds 25] [--model small|large|both]

Both train the same model from the same weights in the same processes, in a random order, round by round; the
ratio is DDP's time over ours, above 1 where ours is faster. "Local" is the same work without any
averaging, which shows what either adds. The small model has many tiny tensors, so the cost per tensor
shows; the large one is bound by moving 100 MB.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World

MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # name: model, width of the input, steps per measurement
    "small": (lambda: mlp(width=40, depth=80), 40, 30),
    "large": (lambda: mlp(width=1250, depth=16), 1250, 2),
}


def mlp(*, width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def trainer(kind: str, make: Callable[[], nn.Module], width: int, steps: int) -> Callable[[], None]:
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if kind == "hora":
        optimizer = hora.DistributedOptimizer(optimizer, model)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(8, width)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return run


def rank_main(name: str, rounds: int) -> None:
    make, width, steps = MODELS[name]
    kinds = ["local", "ddp", "hora"]
    runs = {kind: trainer(kind, make, width, steps) for kind in kinds}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = random.Random(0)  # who comes after whom matters; the same on both ranks
    for _ in range(rounds):
        order.shuffle(kinds)
        for kind in kinds:
            hora.barrier()
            start = time.perf_counter()
            runs[kind]()
            times[kind].append((time.perf_counter() - start) / steps * 1e3)
    if hora.rank() == 0:
        report(name, make(), times)


def report(name: str, model: nn.Module, times: dict[str, list[float]]) -> None:
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    print(f"{name}: {count:,} parameters in {len(parameters)} tensors, {len(times['hora'])} rounds")
    for kind, found in times.items():
        print(f"  {kind:6} {statistics.median(found):9.3f} ms per step (best {min(found):.3f})")
    ratios = sorted(ddp / ours for ddp, ours in zip(times["ddp"], times["hora"], strict=True))
    quarter = len(ratios) // 4
    middle = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
    print(f"  DDP / Hora: {statistics.median(ratios):.2f} (middle half {middle})", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = list(MODELS) if arguments.model == "both" else [arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                world = World(rank=rank, size=2, local_rank=rank, local_size=2)
                hora.init(world, settings=Settings(store=f"file://{Path(folder) / 'store'}"))
                for name in names:
                    rank_main(name, arguments.rounds)
                hora.shutdown()
                sys.stdout.flush()
                os._exit(0)
            children.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    raise SystemExit(main())

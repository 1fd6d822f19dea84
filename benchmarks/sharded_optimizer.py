"""A sharded optimizer against one that is not, DDP, and DDP with ZeroRedundancyOptimizer: time and memory.

    python benchmarks/sharded_optimizer.py [--ranks 2] [--rounds 9] [--width 384] [--fused] [--json FILE]

A transformer language model with AdamW at a small batch. All train it from the same weights in the same
processes, in a random order, round by round. Ratios are of times of one round, above 1 where the sharded
optimizer is faster. Memory is that of the optimizer's state on the rank that has most, over an equal share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World

KINDS = ["sharded", "hora", "ddp", "zero"]
WORDS, LENGTH, BATCH = 8000, 32, 4


class Language(nn.Module):
    """A decoder without a mask: what matters here is its parameters and how long it takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.words(tokens)))
        return scores


def trainer(kind: str, width: int, *, fused: bool) -> tuple[Callable[[], None], Any]:
    torch.manual_seed(0)
    model: Any = Language(width)
    options: Any = {"lr": 1e-4, "fused": fused}
    if kind in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    if kind == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    if kind in ("hora", "sharded"):
        shard: Any = "optimizer" if kind == "sharded" else None
        optimizer = hora.DistributedOptimizer(optimizer, model, shard=shard)
    generator = torch.Generator().manual_seed(hora.rank())
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)

    def run() -> None:
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss: Any = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return run, optimizer


def state_bytes(optimizer: Any) -> int:
    inner = getattr(optimizer, "optim", optimizer)
    values = [value for entries in inner.state.values() for value in entries.values()]
    return sum(value.numel() * value.element_size() for value in values)


def rank_main(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    made = {kind: trainer(kind, arguments.width, fused=arguments.fused) for kind in KINDS}
    for run, _ in made.values():
        run()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order, shuffled = random.Random(0), list(KINDS)  # who comes after whom matters; the same on all ranks
    for _ in range(arguments.rounds):
        order.shuffle(shuffled)
        for kind in shuffled:
            hora.barrier()
            start = time.perf_counter()
            made[kind][0]()
            times[kind].append((time.perf_counter() - start) * 1e3)
    held = {
        kind: float(hora.allreduce(torch.tensor(float(state_bytes(optimizer))), op=hora.Max))
        for kind, (_, optimizer) in made.items()
    }
    if hora.rank() == 0:
        report(arguments, times, held)


def report(arguments: argparse.Namespace, times: dict[str, list[float]], held: dict[str, float]) -> None:
    count = sum(parameter.numel() for parameter in Language(arguments.width).parameters())
    print(f"{count:,} parameters, {hora.size()} ranks, {arguments.rounds} rounds")
    results: dict[str, Any] = {"parameters": count, "ranks": hora.size(), "times": times, "kinds": {}}
    for kind in KINDS:
        ratios = sorted(other / ours for other, ours in zip(times[kind], times["sharded"], strict=True))
        quarter = len(ratios) // 4
        share = held[kind] * hora.size() / held["hora"]
        found: dict[str, Any] = {
            "median": statistics.median(times[kind]),
            "ratio": statistics.median(ratios),
            "middle": (ratios[quarter], ratios[-1 - quarter]),
            "state_over_share": share,
        }
        results["kinds"][kind] = found
        print(
            f"  {kind:8} {found['median']:8.1f} ms a step, {kind} / sharded {found['ratio']:.2f} "
            f"(middle half {found['middle'][0]:.2f} to {found['middle'][1]:.2f}), "
            f"state {held[kind] / 2**20:.1f} MB, {share:.3f} of an equal share",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(arguments.ranks):
            pid = os.fork()
            if pid == 0:
                world = World(rank=rank, size=arguments.ranks, local_rank=rank, local_size=arguments.ranks)
                hora.init(world, settings=Settings(store=f"file://{Path(folder) / 'store'}"))
                rank_main(arguments)
                hora.shutdown()
                sys.stdout.flush()
                os._exit(0)
            children.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    raise SystemExit(main())

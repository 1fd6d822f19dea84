"""How long training stands still for a checkpoint, over how long a synchronous one takes on the same disk.

    python benchmarks/checkpoint_stall.py [--ranks 2] [--mb 200] [--rounds 15] [--json FILE]

Two ranks train a model with AdamW. These take turns, in an order that changes from round to round:

    step            a training step
    save + step     ``hora.save`` and a training step; noted too is the time until ``save`` returns
    save and wait   ``hora.save(...).wait()``: the same checkpoint, synchronously
    dcp.save        ``torch.distributed.checkpoint.save`` with its defaults, which is synchronous
    dcp.async_save  the same in the background: the time until it returns
    copy            a plain copy of as many bytes as a rank writes

Each begins when the one before has been written, and the time of the slower rank counts. The stall is what
``save + step`` takes longer than ``step``, so that what the step waits for, or loses to the thread that
copies and writes, counts as well as what ``save`` itself takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import hora.torch as hora
from _interleave import interleave
from hora.core.settings import Settings
from hora.core.world import World

LIMIT = 600.0


class Training:
    """Linear layers and AdamW: a third of the state is parameters."""

    def __init__(self, mb: float, batch: int) -> None:
        side = int((mb * 2**20 / 3 / 4 / 8) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(8)))
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.optimizer = hora.DistributedOptimizer(optimizer, self.model)
        hora.broadcast_parameters(self.model)
        self.x = torch.randn(batch, side)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def plain(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def slowest(*seconds: float) -> list[float]:
    found: list[float] = hora.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hora.Max).tolist()
    return found


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    warnings.filterwarnings("ignore")
    training = Training(arguments.mb, arguments.batch)
    state = {"model": training.model, "optimizer": training.optimizer}
    training.step()
    group: Any = dist.new_group(backend="gloo")
    numbers = itertools.count(1)
    share = torch.ones(int(arguments.mb * 2**20 / hora.size() / 4))
    target = torch.empty_like(share)

    def save() -> Callable[[], Any]:
        return hora.save(state, next(numbers), directory=directory / "hora", keep=1).wait

    def whole() -> None:
        save()()

    def synchronous() -> None:
        dcp_save(training.plain(), checkpoint_id=folder(), process_group=group)

    def asynchronous() -> Callable[[], Any]:
        future: Any = dcp_async_save(training.plain(), checkpoint_id=folder(), process_group=group)
        result: Callable[[], Any] = future.result
        return result

    def folder() -> Path:
        return directory / "dcp" / str(next(numbers))

    def timed(first: Callable[[], Any], second: Callable[[], Any] | None = None) -> list[float]:
        hora.barrier()
        began = time.perf_counter()
        wait = first()
        returned = time.perf_counter()
        if second is not None:
            second()
        ended = time.perf_counter()
        if wait is not None:
            wait()
        hora.barrier()
        if hora.rank() == 0:
            shutil.rmtree(directory / "dcp", ignore_errors=True)
        hora.barrier()
        return slowest(returned - began, ended - began)

    ways: dict[str, Callable[[], list[float]]] = {
        "step": lambda: timed(training.step),
        "save + step": lambda: timed(save, training.step),
        "save and wait": lambda: timed(whole),
        "dcp.save": lambda: timed(synchronous),
        "dcp.async_save": lambda: timed(asynchronous),
        "copy": lambda: timed(lambda: _copied(target, share)),
    }
    for way in ways.values():
        way()
    return interleave(ways, arguments.rounds)


def _copied(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def rank_main(rank: int, size: int, folder: Path, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = World(
        rank=rank, size=size, local_rank=rank, local_size=size, host_index=0, host_count=1, source="benchmark"
    )
    hora.init(world, settings=Settings(store=f"file://{folder}/store", timeout=LIMIT))
    found = measure(folder, arguments)
    if rank == 0:
        report(found, arguments)
    hora.shutdown()


def report(found: dict[str, list[list[float]]], arguments: argparse.Namespace) -> None:
    what = f"{arguments.mb:g} MB of state, {arguments.ranks} ranks, {arguments.rounds} rounds"
    print(f"{what}; median (low to high)")
    seconds = {name: [pair[1] for pair in pairs] for name, pairs in found.items()}
    seconds["save returns"] = [pair[0] for pair in found["save + step"]]
    for name, each in seconds.items():
        print(f"{name:<16} {statistics.median(each) * 1e3:8.1f} ms   ({spread(each, 1e3, ' ms')})")
    step = statistics.median(seconds["step"])
    stalls = {
        "save returns": seconds["save returns"],
        "save + step, less step": [one - step for one in seconds["save + step"]],
    }
    ratios = {}
    for what, stall in stalls.items():
        for other in ("save and wait", "dcp.save"):
            each = [one / sync for one, sync in zip(stall, seconds[other], strict=True)]
            middle = statistics.median(stall) / statistics.median(seconds[other])
            ratios[f"{what} / {other}"] = {"ratio": middle, "low": min(each), "high": max(each)}
            print(f"{what} / {other}: {middle:.1%}   ({spread(each, 100, ' %')})")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"mb": arguments.mb, "ranks": arguments.ranks, "seconds": seconds, "ratios": ratios}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def spread(values: list[float], factor: float, unit: str) -> str:
    return f"{min(values) * factor:.1f} to {max(values) * factor:.1f}{unit}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="samples of a training step")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hora-stall-", dir=arguments.directory))
    pids = []
    try:
        for rank in range(arguments.ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(rank, arguments.ranks, folder, arguments)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            pids.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

"""ResNet training steps: Hora against PyTorch DDP, two workers, and two workers against one.

    python benchmarks/train_vs_ddp.py [--rounds 30] [--steps 4] [--micro-batch 64]

The same net, weights, optimizer and images in the same processes, which take their turns round by round:

* Hora's DistributedOptimizer,
* DistributedDataParallel as it comes, and with gradient_as_bucket_view=True,
* rank 0 alone, pinned to one core, while rank 1 waits,
* both ranks at once without any communication, the slower one counted: what the machine itself allows.

Ratios are taken within a round and their median is printed with the middle half, so that other work on the
machine disturbs little. Above 1 means that Hora is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World
from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet.config import PROFILES
from hora.workloads.resnet.data import load
from hora.workloads.resnet.learner import Learner, make_optimizer

WORKERS = 2
Step = Callable[[Tensor, Tensor], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4, help="training steps of each kind per round")
    parser.add_argument("--micro-batch", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(WORKERS):
            pid = os.fork()
            if pid == 0:
                world = World(rank=rank, size=WORKERS, local_rank=rank, local_size=WORKERS)
                hora.init(world, settings=Settings(store=f"file://{Path(folder) / 'store'}"))
                worker(arguments.rounds, arguments.steps, arguments.micro_batch)
                hora.shutdown()
                sys.stdout.flush()
                os._exit(0)
            children.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def worker(rounds: int, steps: int, micro_batch: int) -> None:
    quick = PROFILES["quick"]
    profile = dataclasses.replace(quick, data=dataclasses.replace(quick.data, path=fashion_mnist.SHIPPED))
    images = load(profile.data).train
    learner = Learner(profile, distributed=False)
    first = hora.rank() * micro_batch
    batch = learner.put(images.batch(range(first, first + micro_batch), seed=1, epoch=0))
    kinds: dict[str, Step] = {
        "Hora": hora_step(learner.scratch(distributed=True)),
        "DDP": ddp_step(learner.scratch(distributed=False), gradient_as_bucket_view=False),
        "DDP, bucket view": ddp_step(learner.scratch(distributed=False), gradient_as_bucket_view=True),
    }
    alone = hora_step(learner.scratch(distributed=False))
    for step in (*kinds.values(), alone):
        for _ in range(3):
            step(*batch)
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "one worker", "both, apart")}
    for index in range(rounds):
        for name in list(kinds) if index % 2 else reversed(list(kinds)):
            hora.barrier()
            times[name].append(timed(kinds[name], batch, steps))
        hora.barrier()
        own = torch.tensor(timed(alone, batch, steps), dtype=torch.float64)
        times["both, apart"].append(float(hora.allreduce(own, op=hora.Max)))
        hora.barrier()
        if hora.rank() == 0:
            times["one worker"].append(pinned(lambda: timed(alone, batch, steps)))
    if hora.rank() == 0:
        report(times, steps, micro_batch)


def hora_step(learner: Learner) -> Step:
    return lambda images, labels: learner.step(images, labels, lr=1e-4)


def ddp_step(learner: Learner, *, gradient_as_bucket_view: bool) -> Step:
    """The step of ``Learner.step``, with DDP around the model."""
    model = DistributedDataParallel(learner.model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = make_optimizer(dataclasses.replace(learner.profile.optimizer, lr=1e-4), learner.model)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with learner.autocast():
            logits = model(images)
        smoothing = learner.profile.label_smoothing
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def timed(step: Step, batch: tuple[Tensor, Tensor], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    return (time.perf_counter() - start) / steps


def pinned(measure: Callable[[], float]) -> float:
    """Measure on one core only."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return measure()
    finally:
        os.sched_setaffinity(0, cores)


def report(times: dict[str, list[float]], steps: int, micro_batch: int) -> None:
    rounds = len(times["Hora"])
    print(f"{rounds} rounds of {steps} steps, {WORKERS} workers, {micro_batch} images each per step")
    for name, values in times.items():
        print(f"  {name:18} {1000 * statistics.median(values):7.2f} ms per step")
    for name in ("DDP", "DDP, bucket view"):
        show(f"Hora over {name}", [peer / own for own, peer in zip(times["Hora"], times[name], strict=True)])
    pairs = list(zip(times["Hora"], times["one worker"], strict=True))
    show("two workers over one pinned to one core", [WORKERS * one / together for together, one in pairs])
    apart = zip(times["both, apart"], times["one worker"], strict=True)
    show("the same without communication", [WORKERS * one / both for both, one in apart])


def show(title: str, ratios: list[float]) -> None:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    low, high = ordered[quarter], ordered[-1 - quarter]
    print(
        f"  {title:42} {statistics.median(ordered):5.3f}  (middle half {low:.3f} to {high:.3f})", flush=True
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Collectives on one machine: Hora's engine against Gloo, MPI, and a plain copy of the same bytes.

    python benchmarks/collectives.py [--ranks 2 4 8] [--sizes 4 1KiB 64MiB] [--collectives all-reduce ...]

"copy" is each rank copying a buffer of its own at the same time, which reads and writes the bytes once: the
limit that memory sets. "Hora, in the engine" is a buffer that lives in the engine's memory, as the buckets
of gradients do, so that nothing is copied in or out. Each contender is a job of its own, of one thread per
rank; they take turns, burst by burst. The time is that of the slowest rank.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor

import hora.torch as hora
from _collectives import COLLECTIVES, prepared
from _interleave import Report, arguments, interleave, wide_table
from _jobs import Driver, Handler, Job, JobError, Message, Place, Run, bursts
from _trainers import engine
from hora.core.world import World

SIZES = [4**power for power in range(1, 15)] + [100_000_000]
"""Bytes: 4 B to 256 MiB, and the bucket of 100 MB."""

BURST = 0.03
"""Seconds that a burst of calls should take, where one call is shorter."""

ENGINE = "hora.torch.engines"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sorted(SIZES))
    parser.add_argument("--collectives", choices=COLLECTIVES, nargs="+", default=["all-reduce"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=8.0, help="rounds of one size end early after this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("collectives", base="Gloo")
    for ranks in given.ranks:
        with Driver() as driver:
            jobs = start(driver, ranks, report)
            for collective in given.collectives:
                before = len(report.rows)
                for size in given.sizes:
                    case: dict[str, str | int] = {"collective": collective, "ranks": ranks, "bytes": size}
                    report.add(case, measure(jobs, case, given.rounds, given.seconds))
                report.finish(given.json)
                print(wide_table(report.rows[before:]), flush=True)
    return report.finish(given.json)


def start(driver: Driver, ranks: int, report: Report) -> list[Job]:
    """The jobs of those contenders that are there."""
    jobs = [driver.fork("Gloo", ranks, gloo)]
    if importlib.util.find_spec(ENGINE) is None:
        for name in ("Hora", "Hora, in the engine"):
            report.leave_out(name, f"this version has no shared-memory engine ({ENGINE})")
    else:
        try:
            jobs.append(driver.fork("Hora", ranks, shared_memory))
        except JobError as error:
            report.leave_out("Hora", str(error), failed=True)
    # The wheel's mpiexec lies beside the interpreter; mpi4py loads the wheel's library.
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        report.leave_out("MPI", "mpi4py and mpich are missing; write: pip install 'hora[bench]'")
    else:
        rank = str(Path(__file__).with_name("_collectives.py"))
        try:
            jobs.append(driver.command("MPI", ranks, [mpiexec, "-n", str(ranks), sys.executable, rank]))
        except JobError as error:
            report.leave_out("MPI", str(error), failed=True)
    return jobs


def measure(jobs: list[Job], case: Message, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call by contender and round."""
    measures: dict[str, Callable[[], float]] = {}
    for job in jobs:
        for name in job.ask({"prepare": case})[0]["contenders"]:
            calls = max(1, min(300, int(BURST / job.burst(name))))
            measures[name] = functools.partial(job.burst, name, calls=calls)
    return interleave(measures, rounds, seconds=seconds)


class Collectives:
    """The collectives of ``torch.distributed``, on the group that was made."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def empty(self, count: int) -> Tensor:
        return torch.empty(count)

    def barrier(self) -> None:
        dist.barrier()

    def all_reduce(self, array: Tensor) -> None:
        dist.all_reduce(array)

    def reduce_scatter(self, target: Tensor, source: Tensor) -> None:
        dist.reduce_scatter_tensor(target, source)

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        dist.all_gather_into_tensor(target, source)

    def broadcast(self, array: Tensor) -> None:
        dist.broadcast(array, 0)

    def all_to_all(self, target: Tensor, source: Tensor) -> None:
        dist.all_to_all_single(target, source)


def gloo(place: Place) -> Handler:
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank, world_size=place.size)
    by = Collectives()

    def prepare(case: Message) -> Mapping[str, Run]:
        source, target = torch.ones(2, max(1, case["bytes"] // 4))
        return {
            "copy": lambda: target.copy_(source),
            "Gloo": prepared(case["collective"], case["bytes"], by, by.empty),
        }

    return bursts(prepare, by.barrier)


def shared_memory(place: Place) -> Handler:
    os.environ |= {"HORA_ENGINE": "shared-memory", "HORA_STORE": place.store}
    hora.init(World(rank=place.rank, size=place.size, local_rank=place.rank, local_size=place.size))
    by = Collectives()
    if engine() != "hora":
        raise AssertionError(f"the engine is {engine()}")

    def prepare(case: Message) -> Mapping[str, Run]:
        runs = {"Hora": prepared(case["collective"], case["bytes"], by, by.empty)}
        inside = buffer()
        if inside is not None and case["collective"] == "all-reduce":
            runs["Hora, in the engine"] = prepared("all-reduce", case["bytes"], by, inside)
        return runs

    return bursts(prepare, by.barrier)


def buffer() -> Callable[[int], Tensor] | None:
    """What makes a float32 buffer inside the engine's memory; None where it cannot.

    The one place that knows the engine's interface for such buffers.
    """
    group: Any = dist.group.WORLD
    if not hasattr(group, "empty"):
        return None
    return lambda count: group.empty(count, torch.float32)


def parse_size(text: str) -> int:
    units = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "KB": 10**3, "MB": 10**6}
    found = re.fullmatch(r"(\d+) ?(\w*)", text)
    if found is None or found[2] not in units:
        raise ValueError(text)
    return int(found[1]) * units[found[2]]


if __name__ == "__main__":
    raise SystemExit(main())

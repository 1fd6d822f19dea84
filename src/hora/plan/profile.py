"""A step of the user's own script, from the run directory of a run: what ``hora plan --profile`` starts from.

The step's time is split in a part that does not shrink with the batch (launches and the optimizer, from the
number of parameters) and one that does. On the host where it was measured a probe of a second tells how much
slower workers are beside each other; on another GPU the roofline carries it over, half compute, half traffic.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hora.core.errors import HoraError, UsageError
from hora.core.rundir import RunDirectory
from hora.plan.hardware import GPUS, MACHINES, Gpu, Machine
from hora.plan.probe import cores, probe
from hora.plan.question import Profile
from hora.plan.step import Constants

__all__ = ["LOCAL", "read"]

LOCAL = "local"
"""The name of the machine that a run on CPUs was measured on."""
PER_TENSOR = 60e-6
"""Seconds per parameter tensor and step that no smaller batch saves: three launches of 20 us on a CPU."""
WARM = 0.2
"""Share of the first steps that is left out: caches, allocators and compilers warm up in them."""
FEWEST = 5
PASSES = 6
"""Bytes of memory that a worker moves per byte of an all-reduce in shared memory: it reads and writes when it
puts its array in, reads two halves and writes one to sum, and reads and writes when it takes the result."""
SPREAD = 0.02
"""Sigma of workers where a run is too short to tell."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    seconds: list[float]
    plan: dict[str, Any]
    workers: int


def read(path: Path) -> Profile:
    """The profile of a run on one worker.

    Args:
        path: its run directory, written by ``hora run`` with the guard on.

    Raises:
        UsageError: it is no run directory, has no steps, ran on several workers, or does not tell its batch.
    """
    found = _measured(path)
    batch = found.plan.get("global_batch")
    passes = int(found.plan.get("backward_passes", 1))
    if not batch:
        raise UsageError(
            f"--profile {path}: how many samples a step has is not recorded.",
            fix="Load the data with hora.data_loader(dataset, global_batch=...), and run again.",
        )
    steady = sorted(found.seconds[int(WARM * len(found.seconds)) :])
    seconds = statistics.median(steady)
    middle = steady[len(steady) // 10 : len(steady) - len(steady) // 10]
    spread = statistics.pstdev(middle) / seconds if len(middle) >= FEWEST else SPREAD
    samples = float(batch) * passes
    fixed = min(0.5 * seconds, PER_TENSOR * float(found.plan.get("tensors", 0)))
    per_sample = (seconds - fixed) / samples
    gradients = float(found.plan.get("gradient_bytes", 0))
    kept = bool(found.plan.get("fixed_batch", True))
    if found.plan.get("device") == "cpu":
        machine, slowdown = _local(int(found.plan.get("threads", 1)))
        constants = Constants(
            tensor=per_sample * machine.gpu.peak("mixed"),
            plain=per_sample * machine.gpu.peak("fp32"),
            traffic=0.0,
            launch=fixed,
            sigma=min(spread, SPREAD),  # how steps differ in time is the host's doing, which workers share
            exposed=1.0,
        )
        return Profile(
            name=path.name,
            constants=constants,
            machine=machine,
            batch=int(samples),
            gradients=gradients,
            fixed=kept,
            slowdown=slowdown,
        )
    machine = _of_gpu(path, str(found.plan.get("gpu")))
    gpu = machine.gpu
    constants = Constants(
        tensor=0.5 * per_sample * gpu.peak("mixed"),
        plain=0.5 * per_sample * gpu.peak("fp32"),
        traffic=0.5 * per_sample * gpu.bandwidth,
        launch=fixed,
        sigma=min(spread, 0.1),
        exposed=0.25,
    )
    return Profile(
        name=path.name,
        constants=constants,
        machine=machine,
        batch=int(samples),
        gradients=gradients,
        fixed=kept,
    )


def _measured(path: Path) -> _Measured:
    run = f"--profile {path}"
    again = "Write hora run -n 1 train.py, and give its run directory."
    try:
        RunDirectory.open(path)
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
        events = list(_events(path / "events" / "rank-0.jsonl"))
    except HoraError as error:
        raise UsageError(f"{run}: {error.what}", fix=again) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{run}: it cannot be read ({error}).", fix=again) from error
    workers = int(about.get("world", {}).get("size", about.get("workers", 1)))
    if workers != 1:
        raise UsageError(
            f"{run}: it ran on {workers} workers, and their waiting is part of each step.",
            fix="Run it on one: hora run -n 1 train.py",
        )
    steps = [event["stop"] - event["start"] for event in events if event.get("lane") == "steps"]
    plans = [event.get("args") or {} for event in events if event.get("name") == "plan"]
    if len(steps) < FEWEST or not plans:
        raise UsageError(
            f"{run}: {len(steps)} steps were recorded, {FEWEST} are needed"
            + ("." if plans else ", and no plan: the guard was off, or nothing stepped."),
            fix="Let hora.track(loader, epochs=...) go over the batches, for some steps more.",
        )
    return _Measured(seconds=steps, plan=plans[-1], workers=workers)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _local(threads: int) -> tuple[Machine, float]:
    """This host as a machine whose "GPUs" are workers of so many threads, and their slowdown side by side."""
    workers = max(1, cores() // threads)
    found = probe(workers) if workers > 1 else None
    memory = psutil.virtual_memory().total / workers
    bandwidth = found.bandwidth if found else 5e9
    unit = Gpu(
        name=f"{threads} cores",
        generation="CPU",
        mixed=1.0,
        tf32=1.0,
        fp32=1.0,
        memory=memory,
        bandwidth=bandwidth,
        watts=10.0 * threads,
    )
    machine = replace(
        MACHINES["dgx-a100"],
        name=LOCAL,
        gpu=unit,
        gpus=workers,
        intra=bandwidth / PASSES,
        curve="flat",
        watts=10.0 * cores(),
        servers=1,
    )
    return machine, found.slowdown if found else 1.0


def _of_gpu(path: Path, name: str) -> Machine:
    for machine in MACHINES.values():
        generation = machine.gpu.generation
        memory = f"{machine.gpu.memory / 1e9:.0f}"
        if generation in name and (memory in name or generation in ("H100", "B200")):
            return machine
    raise UsageError(
        f"--profile {path}: it ran on {name}, which is none of {', '.join(GPUS)}.",
        fix="Take the profile on one of these, or describe the training by a preset.",
    )

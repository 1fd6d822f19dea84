"""What makes one worker fast on ResNet: each measure against its absence, on one thread.

    python benchmarks/resnet_speed.py [--rounds 9] [--micro-batch 64]

The small net takes training steps on noise, the variants in turn within each round. CPU seconds of this
process are compared, so that other work on the machine disturbs little. A ratio above 1 means that the
measure helps; the workload takes what does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.nn import functional as F

from hora.torch.optim import LARS, decay_groups
from hora.workloads.resnet.config import SMALL
from hora.workloads.resnet.learner import compute_dtype
from hora.workloads.resnet.model import ResNet

STEPS = 4
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-batch", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    micro_batch = arguments.micro_batch
    dtype = compute_dtype("auto", torch.device("cpu"))
    print(f"compute type that is detected: {str(dtype).removeprefix('torch.')}; micro-batch {micro_batch}")

    steps: dict[str, Step] = {
        "as in the workload": training_step(micro_batch, dtype=dtype),
        "without channels last": training_step(micro_batch, dtype=dtype, channels_last=False),
        "in float32": training_step(micro_batch, dtype=torch.float32),
        "in bfloat16": training_step(micro_batch, dtype=torch.bfloat16),
    }
    report(steps, rounds=arguments.rounds, unit="training step")
    optimizers: dict[str, Step] = {
        "SGD, fused (as in the workload)": optimizer_step("fused"),
        "SGD, foreach": optimizer_step("foreach"),
        "SGD, one tensor after the other": optimizer_step("plain"),
        "LARS": optimizer_step("lars"),
    }
    report(optimizers, rounds=arguments.rounds, unit="optimizer step")


def training_step(micro_batch: int, *, dtype: torch.dtype, channels_last: bool = True) -> Step:
    torch.manual_seed(0)
    model = ResNet(SMALL)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(decay_groups_of_sgd(model), lr=0.01, momentum=0.9, fused=True)
    # With one channel both layouts are the same bytes; the strides decide which one the convolutions take.
    pixels = torch.randn(micro_batch, 28, 28, 1)
    images = pixels.permute(0, 3, 1, 2) if channels_last else pixels.view(micro_batch, 1, 28, 28)
    labels = torch.randint(10, (micro_batch,))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images)
        F.cross_entropy(logits.float(), labels, label_smoothing=0.1).backward()
        optimizer.step()

    return step


def optimizer_step(kind: str) -> Step:
    model = ResNet(SMALL)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    if kind == "lars":
        return LARS(decay_groups(model, weight_decay=4e-4), 0.01).step
    ways = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "plain": {"foreach": False, "fused": False},
    }
    return torch.optim.SGD(decay_groups_of_sgd(model), lr=0.01, momentum=0.9, **ways[kind]).step


def decay_groups_of_sgd(model: ResNet) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key != "trust"}
        for group in decay_groups(model, weight_decay=4e-4)
    ]


def report(steps: dict[str, Step], *, rounds: int, unit: str) -> None:
    """Print each variant's CPU time, and its ratio to the first one, from the same rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # allocates, and compiles kernels
        step()
        step()
    for index in range(rounds):
        for name in list(steps) if index % 2 == 0 else reversed(list(steps)):
            start = time.process_time()
            for _ in range(STEPS):
                steps[name]()
            times[name].append((time.process_time() - start) / STEPS)
    first = next(iter(times.values()))
    print(f"\n{unit:34} CPU time   slower than the workload's way, median (lowest to highest)")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        spread = f"{statistics.median(ratios):5.2f}   ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:34} {1000 * statistics.median(values):7.2f} ms  {spread}")


if __name__ == "__main__":
    main()

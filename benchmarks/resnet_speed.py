"""What makes one worker fast on ResNet: each measure against its absence, on one thread.

    python benchmarks/resnet_speed.py [--rounds 9] [--micro-batch 64]

The small net takes training steps on noise, the variants in turn within each round. CPU seconds of this
process are compared, so that other work on the machine disturbs little. A variant's ratio below 1 means that
the workload's way, which is the first, is the faster one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.nn import functional as F

from _interleave import Report, arguments, interleave, long_table
from hora.torch.optim import LARS, decay_groups
from hora.workloads.resnet.config import SMALL
from hora.workloads.resnet.learner import compute_dtype
from hora.workloads.resnet.model import ResNet

STEPS = 4
Step = Callable[[], object]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-batch", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    micro_batch = given.micro_batch
    dtype = compute_dtype("auto", torch.device("cpu"))
    print(f"compute type that is detected: {str(dtype).removeprefix('torch.')}; micro-batch {micro_batch}")

    steps: dict[str, Step] = {
        "as in the workload": training_step(micro_batch, dtype=dtype),
        "without channels last": training_step(micro_batch, dtype=dtype, channels_last=False),
        "in float32": training_step(micro_batch, dtype=torch.float32),
        "in bfloat16": training_step(micro_batch, dtype=torch.bfloat16),
    }
    report = Report("resnet_speed", base="as in the workload")
    measure(report, "training step", steps, given.rounds)
    optimizers: dict[str, Step] = {
        "SGD, fused (as in the workload)": optimizer_step("fused"),
        "SGD, foreach": optimizer_step("foreach"),
        "SGD, one tensor after the other": optimizer_step("plain"),
        "LARS": optimizer_step("lars"),
    }
    measure(report, "optimizer step", optimizers, given.rounds)
    print(long_table(report.rows))
    return report.finish(given.json)


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
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
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


def measure(report: Report, what: str, steps: dict[str, Step], rounds: int) -> None:
    """CPU seconds of a step of each variant, beside those of the first one."""
    for step in steps.values():  # allocates, and compiles kernels
        step()
        step()
    measures = {name: functools.partial(cpu_seconds, step) for name, step in steps.items()}
    report.add({"measure": what}, interleave(measures, rounds), base=next(iter(steps)))


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - start) / STEPS


if __name__ == "__main__":
    raise SystemExit(main())

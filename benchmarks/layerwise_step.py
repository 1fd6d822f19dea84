"""Steps of LARS, LAMB and NovoGrad against loops over the parameters, one after the other.

    python benchmarks/layerwise_step.py [--rounds 9] [--device cuda]

Each tensor of a ResNet takes a step; the variants take turns within each round. On a CPU the seconds of this
process are compared, one thread, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from _interleave import Report, arguments, interleave, long_table
from hora.torch.optim import LAMB, LARS, NovoGrad
from hora.workloads.resnet.config import RESNET50, SMALL
from hora.workloads.resnet.model import ResNet

Step = Callable[[], object]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("layerwise_step", base="a loop")
    for name, config, steps in (("220,090 parameters", SMALL, 20), ("25.6 M parameters", RESNET50, 1)):
        for optimizer, variants in VARIANTS.items():
            ways = {way: make(_parameters(ResNet(config).to(given.device))) for way, make in variants.items()}
            for step in ways.values():  # allocates the state
                step()
            measures = {way: functools.partial(_seconds, step, steps) for way, step in ways.items()}
            report.add({"model": name, "optimizer": optimizer}, interleave(measures, given.rounds))
    print(long_table(report.rows))
    return report.finish(given.json)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@torch.no_grad()
def _lars(parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> None:
    for w, v in zip(parameters, buffers, strict=True):
        assert w.grad is not None
        size, slope = w.norm(), w.grad.norm()
        if size > 0 and slope > 0:
            v.mul_(0.9).add_(w.grad + 1e-4 * w, alpha=float(0.001 * size / (slope + 1e-4 * size)))
            w.sub_(v)


@torch.no_grad()
def _lamb(parameters: Sequence[nn.Parameter], moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    for w, (m, v) in zip(parameters, moments, strict=True):
        assert w.grad is not None
        m.mul_(0.9).add_(w.grad, alpha=0.1)
        v.mul_(0.999).addcmul_(w.grad, w.grad, value=0.001)
        u = m / 0.5 / ((v / 0.5).sqrt() + 1e-6) + 0.01 * w
        size, length = w.norm(), u.norm()
        if size > 0 and length > 0:
            w.sub_(u, alpha=float(0.002 * size / length))


@torch.no_grad()
def _novograd(parameters: Sequence[nn.Parameter], moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    for w, (m, v) in zip(parameters, moments, strict=True):
        assert w.grad is not None
        v.mul_(0.98).add_(w.grad.norm() ** 2, alpha=0.02)
        m.mul_(0.95).add_(w.grad / (v.sqrt() + 1e-8) + 0.001 * w)
        w.sub_(m, alpha=0.01)


def _rows(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(parameter) for parameter in parameters]


VARIANTS: dict[str, dict[str, Callable[[list[nn.Parameter]], Step]]] = {
    "LARS": {
        "a loop": lambda p: functools.partial(_lars, p, _rows(p)),
        "Hora": lambda p: LARS(p, 1.0, weight_decay=1e-4).step,
    },
    "LAMB": {
        "a loop": lambda p: functools.partial(_lamb, p, list(zip(_rows(p), _rows(p), strict=True))),
        "Hora": lambda p: LAMB(p, 0.002, weight_decay=0.01).step,
        "torch's AdamW": lambda p: torch.optim.AdamW(p, 0.002, foreach=True).step,
    },
    "NovoGrad": {
        "a loop": lambda p: functools.partial(_novograd, p, [(row, row.new_ones(())) for row in _rows(p)]),
        "Hora": lambda p: NovoGrad(p, 0.01, weight_decay=0.001).step,
    },
}


def _seconds(step: Step, steps: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        clock = time.perf_counter
    else:
        clock = time.process_time
    start = clock()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (clock() - start) / steps


if __name__ == "__main__":
    raise SystemExit(main())

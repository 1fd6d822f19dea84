"""How the cost of averaging grows: with the ranks, 1 to 8, and with the parameters, 0.1 M to 25 M.

    python benchmarks/scaling.py [--ranks 1 2 4 8] [--parameters 100000 1000000 ...] [--rounds 9]

An MLP takes training steps on few samples, so that a step is mostly what its parameters cost. "apart" are the
same steps of as many ranks at once without communication: what the machine itself allows, with more ranks
than cores too. The ratio to it is the efficiency, and the difference the cost. Contenders are jobs of
their own, which take turns, burst by burst.
"""

from __future__ import annotations

import functools
import math
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # every optimizer imports it, which takes seconds: once is enough

from _interleave import Case, Report, arguments, interleave, wide_table
from _jobs import Driver, Handler, Place, bursts
from _models import Model, mlp, noise
from _trainers import TRAINERS

CONTENDERS = {"apart": "one worker", "Hora": "Hora", "DDP": "DDP"}
"""And who trains for them."""

DEPTH = 16
PARAMETERS = (100_000, 1_000_000, 5_000_000, 25_000_000)
BURST = 0.2
"""Seconds that a burst should take, where a step is shorter."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parameters", type=int, nargs="+", default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=12.0, help="rounds of one case end early after this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("scaling", base="apart")
    middle = sorted(given.parameters)[(len(given.parameters) - 1) // 2]
    cases: list[Case] = [{"ranks": ranks, "parameters": middle} for ranks in given.ranks]
    most = min(given.ranks, key=lambda ranks: abs(ranks - 2))
    cases += [{"ranks": most, "parameters": count} for count in given.parameters if count != middle]
    for case in cases:
        measure(report, case, rounds=given.rounds, seconds=given.seconds)
        report.finish(given.json)
    print(wide_table(report.rows))
    return report.finish(given.json)


def measure(report: Report, case: Case, *, rounds: int, seconds: float) -> None:
    ranks, parameters = int(case["ranks"]), int(case["parameters"])
    with Driver() as driver:
        measures = {}
        for name, trainer in CONTENDERS.items():
            job = driver.fork(name, ranks, functools.partial(rank_of, trainer, parameters))
            steps = max(1, min(50, int(BURST / job.burst("step", warm=3))))
            measures[name] = functools.partial(job.burst, "step", calls=steps)
        report.add(case, interleave(measures, rounds, seconds=seconds))


def rank_of(trainer: str, parameters: int, place: Place) -> Handler:
    training = TRAINERS[trainer](model(parameters), place)

    def barrier() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    answer = bursts(lambda case: {"step": training.step}, barrier)
    answer({"prepare": {}})
    return answer


def model(parameters: int) -> Model:
    width = width_of(parameters)
    return Model(
        make=lambda: mlp(width=width, depth=DEPTH),
        batch=lambda generator: noise(width, generator),
        optimizer=torch.optim.SGD,
        arguments={"lr": 1e-4, "momentum": 0.9, "fused": True},
    )


def width_of(parameters: int) -> int:
    """Width of the MLP that has about so many parameters: each layer has width * (width + 1)."""
    return max(1, round((math.sqrt(1 + 4 * parameters / DEPTH) - 1) / 2))


if __name__ == "__main__":
    raise SystemExit(main())

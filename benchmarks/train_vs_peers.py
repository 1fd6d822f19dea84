"""Training steps: Hora against DDP, ZeRO, FSDP2, Accelerate and Fabric, and against one worker alone.

    python benchmarks/train_vs_peers.py [--models resnet transformer ...] [--ranks 2] [--rounds 9]

The models: the small ResNet of the workload on 64 images per rank; a transformer of 27 M parameters on 4 x 32
tokens per rank with Adam; a click model of 13 M parameters, nearly all in embedding tables, with Adam; and
an MLP of 160 tiny tensors, on which what each tensor costs shows. "one worker" trains alone, and "apart" are
all ranks at once without communication: what the machine itself allows.
Each contender is a job of its own, of one thread per rank, that trains the same model from the same weights
on the same data; they take turns, burst by burst. The time of a step is that of the slowest rank. Contenders
whose loss is not DDP's after the first steps count as failed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # every optimizer imports it, which takes seconds: once is enough
import torch.distributed.fsdp

from _interleave import Report, arguments, interleave, long_table
from _jobs import Driver, Handler, Job, JobError, Message, Place, Run, bursts
from _models import MODELS
from _trainers import ALONE, TRAINERS, different, engine, missing, peak_memory

FIRST_STEPS = 4
"""Steps after which the losses are compared."""

COMPARED = [name for name in MODELS if name != "tiny"]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=COMPARED)
    parser.add_argument("--contenders", choices=TRAINERS, nargs="+", default=list(TRAINERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="rounds of one model end early after this"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("train_vs_peers", base="DDP")
    for model in given.models:
        before = len(report.rows)
        compare(
            report, model, given.contenders, ranks=given.ranks, rounds=given.rounds, seconds=given.seconds
        )
        report.finish(given.json)
        print(long_table(report.rows[before:]), flush=True)
    return report.finish(given.json)


def compare(
    report: Report, model: str, contenders: list[str], *, ranks: int, rounds: int, seconds: float
) -> None:
    with Driver() as driver:
        jobs: dict[str, Job] = {}
        losses: dict[str, float] = {}
        for name in contenders:
            reason = missing(name)
            if reason is not None:
                report.leave_out(name, reason)
                continue
            size = 1 if name == ALONE else ranks
            try:
                job = driver.fork(name, size, functools.partial(rank_of, name, model))
                answers = job.ask({"first steps": FIRST_STEPS})
            except JobError as error:
                report.leave_out(name, f"{model}: {error}", failed=True)
                continue
            jobs[name] = job
            losses[name] = sum(answer["loss"] for answer in answers) / size
            loss = f"loss after {FIRST_STEPS} steps {losses[name]:.6f}"
            report.note(f"{model}, {name}", f"engine {answers[0]['engine']}, {loss}")
        for name, text in different(losses).items():
            report.leave_out(name, f"{model}: {text}", failed=True)
            driver.end(jobs.pop(name))
        steps = MODELS[model].steps
        measures = {name: functools.partial(job.burst, "step", calls=steps) for name, job in jobs.items()}
        case: dict[str, str | int] = {"model": model, "ranks": ranks}
        report.add(case | {"measure": "step"}, interleave(measures, rounds, seconds=seconds))
        for what in ("optimizer memory", "peak memory"):
            most = {
                name: [float(max(answer[what] for answer in job.ask({"memory": True})))]
                for name, job in jobs.items()
            }
            report.add(case | {"measure": what}, most, unit="bytes")


def rank_of(name: str, model: str, place: Place) -> Handler:
    training = TRAINERS[name](MODELS[model], place)

    def barrier() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        elif "horovod.torch" in sys.modules:
            sys.modules["horovod.torch"].barrier()

    prepared: Mapping[str, Run] = {"step": training.step}
    answer = bursts(lambda case: prepared, barrier)
    answer({"prepare": {}})

    def handler(order: Message) -> Message:
        if "first steps" in order:
            losses = [float(training.step()) for _ in range(order["first steps"])]
            return {"loss": losses[-1], "engine": engine()}
        if "memory" in order:
            return {"optimizer memory": training.optimizer_bytes(), "peak memory": peak_memory()}
        return answer(order)

    return handler


if __name__ == "__main__":
    raise SystemExit(main())

"""Try many: layouts of a model, sizes of a cluster, machines; and pick what was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hora.core.errors import UsageError
from hora.plan.convergence import curve
from hora.plan.hardware import Machine
from hora.plan.memory import Layout, Transformer
from hora.plan.models import Workload
from hora.plan.prediction import predict
from hora.plan.question import Prediction, Profile, Question
from hora.plan.transformer import software_for

__all__ = ["Deadline", "best_batch", "best_layouts", "deadline", "doublings", "sweep"]

MOST_SERVERS = 1024
"""Where the search for enough GPUs ends on a cluster without a size of its own."""
LARGEST_MICRO_BATCH = 16
RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


def doublings(first: int, last: int, machine: Machine) -> list[int]:
    """GPU counts from ``first`` to ``last``, each twice the one before, that fill whole servers beyond one.

    Raises:
        UsageError: the range is empty or starts below 1.
    """
    if not 1 <= first <= last:
        raise UsageError(
            f"--sweep gpus={first}..{last}: it does not go up from 1 or more.",
            fix=f"Write --sweep gpus={max(1, min(first, last))}..{max(1, first, last)}.",
        )
    found, gpus = [], first
    while gpus < last:
        found.append(gpus)
        gpus *= 2
    found.append(last)
    whole = (max(1, n // machine.gpus) * machine.gpus if n > machine.gpus else n for n in found)
    return list(dict.fromkeys(whole))


def sweep(question: Question, counts: Sequence[int]) -> list[Prediction]:
    """The same training on different numbers of GPUs, each with its best batch where none is asked for."""
    return [predict(best_batch(replace(question, gpus=gpus))) for gpus in counts]


def best_batch(question: Question) -> Question:
    """With the global batch that reaches the target soonest, of powers of two below the usual one per GPU.

    Each worker of a profile has as many samples as the one that was measured. A question that names its
    batch, or whose model has no convergence curve, stays as it is.
    """
    model = question.model
    if isinstance(model, Profile) and not question.batch:
        return replace(question, batch=int(model.batch) * question.gpus)
    if question.batch or question.epochs or not isinstance(model, Workload) or not model.curve:
        return question
    if curve(model.curve) is None or not model.samples:
        return question
    tried, each = [], float(model.batch)
    while each >= 1:
        tried.append(replace(question, batch=max(1, int(each)) * question.gpus))
        each /= 2

    def seconds(one: Question) -> float:
        training = predict(one).training
        return training.value if training else float("inf")

    return min(tried, key=seconds)


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The fewest GPUs that reach the target in time: by the value, and by the slow end of the interval.

    ``None`` where no number of GPUs does; ``fastest`` tells how near one comes.
    """

    seconds: float
    likely: Prediction | None
    safe: Prediction | None
    fastest: Prediction


def deadline(question: Question, seconds: float) -> Deadline:
    """How many GPUs reach the target within ``seconds``.

    Raises:
        UsageError: the time is not positive, or the model has no known target.
    """
    if not seconds > 0:
        raise UsageError(f"--deadline {seconds:g}s: a time is more than 0.", fix="Write --deadline 80s.")
    machine = question.machine
    servers = machine.servers or MOST_SERVERS
    counts = [n for n in (1, 2, 4) if n < machine.gpus] + [machine.gpus * n for n in _steps(servers)]
    likely = safe = fastest = None
    for found in sweep(question, counts):
        if found.training is None:
            raise UsageError(
                f"--deadline: how many epochs {question.name} needs is not known.",
                fix="Write --epochs 90 --samples 1281167.",
            )
        if fastest is None or fastest.training is None or found.training.value < fastest.training.value:
            fastest = found
        if likely is None and found.training.value <= seconds:
            likely = found
        if safe is None and found.training.high <= seconds:
            safe = found
    assert fastest is not None
    return Deadline(seconds=seconds, likely=likely, safe=safe, fastest=fastest)


def _steps(most: int) -> Iterator[int]:
    """1 to 16, then in steps of a sixteenth of the size: fine enough for an answer, and few enough."""
    size = 1
    while size <= most:
        yield size
        size += max(1, size // 16)


def best_layouts(question: Question, *, count: int = 5) -> list[Prediction]:
    """The fastest layouts of a transformer that fit into memory, fastest first.

    Tries tensor x pipeline x data parallel x micro-batch x interleaving x recomputation x ZeRO 1. When none
    fits, the one that lacks least is returned alone, with what would make it fit.

    Raises:
        UsageError: the model is no transformer, or no layout divides it and the GPUs.
    """
    model = question.model
    if not isinstance(model, Transformer):
        raise UsageError(
            f"--search: {question.name} is trained data parallel only; there is nothing to search.",
            fix="Write --search with a GPT preset or --layers, --hidden, --heads.",
        )
    best: list[tuple[float, Question]] = []
    least: tuple[float, Question] | None = None
    for layout, micro in _layouts(model, question):
        asked = replace(question, layout=layout, micro_batch=micro)
        found = predict(asked, quick=True)
        assert found.held is not None
        if found.fits:
            best.append((found.step.value, asked))
        elif least is None or found.held.total < least[0]:
            least = found.held.total, asked
    if best:
        best.sort(key=lambda pair: pair[0])
        return [predict(asked) for _, asked in best[:count]]
    if least is None:
        raise UsageError(
            f"--search: no tensor x pipeline x data parallel layout of {question.gpus} GPUs divides "
            f"{model.layers} layers and {model.heads} heads.",
            fix=f"Write --gpus {question.machine.gpus * 8} --batch {question.machine.gpus * 8}.",
        )
    return [predict(least[1])]


def _layouts(model: Transformer, question: Question) -> Iterator[tuple[Layout, int]]:
    """Every layout that divides the model, the GPUs and the batch."""
    gpus, batch = question.gpus, question.batch
    flash = software_for(question.machine) == "megatron-core"  # it keeps no scores to recompute
    recomputations = [kind for kind in RECOMPUTE if not (flash and kind == "selective")]
    for tensor in _divisors(question.machine.gpus):
        if gpus % tensor or model.heads % tensor or model.hidden % tensor:
            continue
        for pipeline in _divisors(model.layers):
            if gpus % (tensor * pipeline):
                continue
            data = gpus // (tensor * pipeline)
            whole = batch or data * 4 * pipeline
            if whole % data:
                continue
            for micro in (size for size in (1, 2, 4, 8, LARGEST_MICRO_BATCH) if whole // data % size == 0):
                micro_batches = whole // data // micro
                chunks = _divisors(model.layers // pipeline) if pipeline > 1 else [1]
                for interleaved in (v for v in chunks if v == 1 or micro_batches % pipeline == 0):
                    for recompute in recomputations:
                        yield (
                            Layout(
                                tensor=tensor,
                                pipeline=pipeline,
                                interleaved=interleaved,
                                recompute=recompute,
                                sequence_parallel=tensor > 1,
                                zero=1 if data > 1 else 0,
                            ),
                            micro,
                        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

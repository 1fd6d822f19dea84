"""Answer a question about a training on a cluster: time, memory, energy and price, each with an interval."""

from __future__ import annotations

import math
from dataclasses import replace

from hora.core.errors import UsageError
from hora.plan import failures, memory, transformer
from hora.plan.calibration import Calibrated, calibrated, kernels
from hora.plan.convergence import curve
from hora.plan.hardware import GPUS
from hora.plan.memory import Change, Layout, Memory, Transformer
from hora.plan.models import Workload
from hora.plan.published import MLPERF
from hora.plan.question import Interval, Prediction, Profile, Question
from hora.plan.step import Parts, Work, step

__all__ = ["CLOSED_FORM", "OTHER_GENERATION", "PER_DOUBLING", "half_width", "predict", "work_of"]

KNOWN = 0.03
"""Half of a step's 80 % interval where the same configuration was measured; with ``UNKNOWN`` it follows the
80th percentile of the leave-one-out errors of single-node rows, by how near the nearest other row is."""
UNKNOWN = 0.11
"""What is added where no measurement is near."""
OTHER_GENERATION = 0.15
"""What is added where no GPU of this generation was measured: the roofline alone carries over."""
LOCAL_NOISE = 0.07
"""What is added for a profile: two runs of one script on one host differ by so much."""
PER_DOUBLING = 0.01
"""What each doubling of the servers adds: two thirds of ``step.PER_DOUBLING``, wrong either way."""
CLOSED_FORM = 0.09
"""Half of the interval of a transformer's closed form on machines that it was fitted on."""


def predict(question: Question, *, quick: bool = False) -> Prediction:
    """The answer to one question, in well under 50 ms.

    Args:
        question: what is asked.
        quick: leaves out what would make it fit, for a search over thousands.

    Raises:
        UsageError: it cannot be: fewer samples than workers, a layout that does not divide the model, more
            GPUs than the cluster has. The error names the nearest choice that can.
    """
    _check(question)
    if isinstance(question.model, Transformer):
        asked, parts, half, unit, basis = _transformer(question, question.model)
    else:
        asked, parts, half, unit, basis = _data_parallel(question)
    seconds = Interval.around(parts.total, half)
    rate = seconds.under(asked.batch)
    held, changes = _memory(asked, quick=quick)
    epochs, training = _training(asked, rate)
    goodput = failures.plan_checkpoints(
        asked.gpus,
        checkpoint=asked.checkpoint,
        restart=asked.restart,
        gpu_hours_per_failure=asked.gpu_hours_per_failure,
    )
    if training is not None and training.value > goodput.interval:  # a shorter one writes no checkpoint
        training *= 1 / max(goodput.fraction, 1e-9)
    kilowatts = asked.machine.watts / asked.machine.gpus * asked.gpus / 1000
    price = asked.price or asked.machine.price
    hours = training * (1 / 3600) if training else None
    return Prediction(
        question=asked,
        batch=asked.batch,
        unit=unit,
        parts=parts,
        step=seconds,
        rate=rate,
        efficiency=_efficiency(asked),
        held=held,
        capacity=asked.machine.gpu.memory,
        changes=changes,
        layout=asked.layout if isinstance(asked.model, Transformer) else None,
        epochs=epochs,
        training=training,
        energy=hours * kilowatts if hours else None,
        price=hours * (price * asked.gpus) if hours and price else None,
        goodput=goodput,
        basis=basis,
    )


def _check(question: Question) -> None:
    machine, gpus = question.machine, question.gpus
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: there is at least one.", fix=f"Write --gpus {machine.gpus}.")
    if machine.most and gpus > machine.most:
        raise UsageError(
            f"--gpus {gpus}: {machine.name} has {machine.servers} servers with {machine.most} GPUs.",
            fix=f"Write --gpus {machine.most}.",
        )
    if gpus > machine.gpus and gpus % machine.gpus:
        below, above = gpus // machine.gpus * machine.gpus, -(-gpus // machine.gpus) * machine.gpus
        near = below if gpus - below < above - gpus else above
        raise UsageError(
            f"--gpus {gpus}: beyond one server, servers are used whole, {machine.gpus} GPUs each.",
            fix=f"Write --gpus {near}.",
        )


def _share(question: Question, workers: int, default: float) -> tuple[Question, int]:
    """The question with its global batch filled in, and samples per worker."""
    most = math.inf  # of the batches that reference runs have reached
    if isinstance(question.model, Workload) and question.model.curve and question.model.unit != "tokens":
        found = curve(question.model.curve)
        most = found.high if found else math.inf
    batch = question.batch or max(workers, int(min(default * workers, most)) // workers * workers)
    if batch < workers:
        raise UsageError(
            f"--batch {batch}: fewer samples than the {workers} workers.", fix=f"Write --batch {workers}."
        )
    if batch % workers:
        near = max(1, round(batch / workers)) * workers
        raise UsageError(
            f"--batch {batch}: it is not divided by {workers} workers.", fix=f"Write --batch {near}."
        )
    return replace(question, batch=batch), batch // workers


def _data_parallel(question: Question) -> tuple[Question, Parts, float, str, str]:
    model = question.model
    assert isinstance(model, (Workload, Profile))
    if isinstance(model, Profile) and model.fixed and not question.batch:
        question = replace(question, batch=int(model.batch))
    usual = model.batch if isinstance(model, Profile) or question.precision == "mixed" else model.batch / 2
    question, each = _share(question, question.gpus, usual)
    micro = question.micro_batch or each
    if each % micro:
        near = min((d for d in range(1, each + 1) if each % d == 0), key=lambda d: abs(d - micro))
        raise UsageError(
            f"--micro-batch {micro}: it does not divide a worker's {each} samples.",
            fix=f"Write --micro-batch {near}.",
        )
    work = work_of(question, model)
    if isinstance(model, Profile):
        same = model.machine.name == question.machine.name
        if not same and "CPU" in (question.machine.gpu.generation, model.machine.gpu.generation):
            raise UsageError(
                f"--on {question.machine.name}: {model.name} was measured on CPUs, not on GPUs.",
                fix=f"Leave out --on, or take the profile on one GPU of a {question.machine.name}.",
            )
        parts = step(model.beside(question.gpus), work, question.machine)
        return (
            question,
            parts,
            KNOWN + LOCAL_NOISE if same else KNOWN + UNKNOWN,
            "samples",
            f"a step of {model.name}",
        )
    group, found = _nearest_group(model.name, question, work)
    parts, nearness = found.parts(work, question.machine)
    half = half_width(nearness, question.machine.nodes(question.gpus))
    if all(row.machine.gpu.generation != question.machine.gpu.generation for row in found.rows):
        half += OTHER_GENERATION
    basis = f"{len(found.rows)} measurements of {group[1]} with {group[0]} on one server"
    return question, parts, half, model.unit, basis


def half_width(nearness: float, nodes: int) -> float:
    """Half of a step's 80 % interval, as a logarithm; ``nearness`` of the nearest measurement is 0 to 1."""
    return KNOWN + UNKNOWN * (1 - nearness) + PER_DOUBLING * math.log2(nodes)


def _nearest_group(name: str, question: Question, work: Work) -> tuple[tuple[str, str, str, str], Calibrated]:
    """The measurements that say most: the benchmark's own round on its GPUs, or the nearest, or the most."""
    groups = {group: found for group, found in calibrated().items() if group[1] == name}
    if name == "bert-large":
        groups = {group: found for group, found in groups.items() if group[2:] == ("pretrain", "128")}
    if question.software:
        known = sorted({group[0] for group in groups})
        groups = {group: found for group, found in groups.items() if group[0] == question.software}
        if not groups:
            raise UsageError(
                f"--software {question.software}: no measurements of {name}. There are {', '.join(known)}.",
                fix=f'Write --software "{known[0]}".',
            )

    def says(group: tuple[str, str, str, str]) -> tuple[bool, float, int]:
        _, nearness = groups[group].parts(work, question.machine)
        own = group[0] == MLPERF and question.machine.gpu.generation == "V100"
        return own, round(nearness, 1), len(groups[group].rows)

    best = max(groups, key=says)
    return best, groups[best]


def _transformer(question: Question, model: Transformer) -> tuple[Question, Parts, float, str, str]:
    layout, machine = question.layout, question.machine
    if layout.tensor > machine.gpus:
        raise UsageError(
            f"--tensor {layout.tensor}: more than the {machine.gpus} GPUs of one {machine.name}.",
            fix=f"Write --tensor {machine.gpus}.",
        )
    parallel = layout.tensor * layout.pipeline
    if question.gpus % parallel:
        near = max(1, round(question.gpus / parallel)) * parallel
        raise UsageError(
            f"--gpus {question.gpus}: not divided by {layout.tensor} tensor x {layout.pipeline} pipeline.",
            fix=f"Write --gpus {near}.",
        )
    data = question.gpus // parallel
    question, each = _share(question, data, 4 * layout.pipeline)
    micro = question.micro_batch or next(size for size in (4, 2, 1) if each % size == 0)
    if each % micro:
        raise UsageError(
            f"--micro-batch {micro}: it does not divide a worker's {each} sequences.",
            fix="Write --micro-batch 1.",
        )
    layout = replace(layout, data=data, micro_batch=micro, micro_batches=each // micro)
    name = question.software or transformer.software_for(machine)
    if name not in transformer.SOFTWARE:
        raise UsageError(
            f"--software {name}: no such release. Known are {', '.join(transformer.SOFTWARE)}.",
            fix=f"Write --software {transformer.software_for(machine)}.",
        )
    software = transformer.SOFTWARE[name]
    memory.estimate(
        model, layout, precision=memory.MEGATRON
    )  # says when the layout does not divide the model
    parts = transformer.step(model, layout, machine, kernels(), software)
    half = CLOSED_FORM + PER_DOUBLING * math.log2(machine.nodes(question.gpus))
    if machine.gpu.generation in transformer.THROTTLED:
        half += OTHER_GENERATION / 2  # its constants are of other generations, but its software is known
    question = replace(question, layout=layout)
    return question, parts, half, "sequences", f"the closed form of {name}, fitted to 10 single-node runs"


def _memory(question: Question, *, quick: bool) -> tuple[Memory | None, list[Change]]:
    model, machine = question.model, question.machine
    if isinstance(model, Profile):
        return None, []
    if isinstance(model, Transformer):
        flash = transformer.software_for(machine) == "megatron-core"
        layout = replace(question.layout, flash=question.layout.flash or flash)
        held = memory.estimate(model, layout, precision=memory.MEGATRON)
        changes = (
            []
            if quick
            else memory.what_would_fit(
                model,
                layout,
                capacity=machine.gpu.memory,
                gpus_per_node=machine.gpus,
                precision=memory.MEGATRON,
            )
        )
        return held, changes
    micro = question.micro_batch or question.batch // question.gpus
    mixed = question.precision == "mixed"
    if model.shape is not None:
        adam = memory.ADAM_MIXED if mixed else memory.ADAM_FP32
        layout = Layout(micro_batch=micro, data=question.gpus)
        return memory.estimate(model.shape, layout, precision=adam), memory.what_would_fit(
            model.shape, layout, capacity=machine.gpu.memory, gpus_per_node=machine.gpus, precision=adam
        )
    sgd = memory.SGD_MIXED if mixed else memory.SGD_FP32
    cnn = model.cnn if mixed else replace(model.cnn, activation_bytes=2 * model.activations)
    return memory.estimate_cnn(cnn, micro_batch=micro, precision=sgd), []


def _training(question: Question, rate: Interval) -> tuple[Interval | None, Interval | None]:
    """Epochs and seconds until the target."""
    model = question.model
    samples = question.samples or (model.samples if isinstance(model, Workload) else 0.0)
    if not samples:
        return None, None
    if question.epochs:
        epochs = Interval(low=question.epochs, value=question.epochs, high=question.epochs)
        half = 0.0
    else:
        name = model.curve if isinstance(model, Workload) else ""
        first = question.machine.gpu.generation == "V100"
        found = curve(name, first_round=first) if name else None
        if found is None:
            return None, None
        batch = (
            question.batch / 50 if name == "gnmt" else question.batch
        )  # its points count pairs of sentences
        half = found.half_width(batch)
        epochs = Interval.around(found.epochs(batch), half)
    whole = math.hypot(math.log(rate.high / rate.value), half)
    seconds = epochs.value * samples / rate.value
    if isinstance(model, Workload):
        speed = question.machine.gpu.bandwidth / GPUS["V100-SXM2-16GB"].bandwidth
        count = math.ceil(epochs.value / model.evaluate_every)
        seconds += count * model.evaluation / speed / question.gpus + model.overhead
    return epochs, Interval.around(seconds, whole)


def _efficiency(question: Question) -> float:
    """Rate per GPU over that of one server (or of one GPU, inside it) at the same batch per GPU."""
    if isinstance(question.model, Transformer):
        return 1.0  # its layout changes with the GPUs; utilization tells more
    base = 1 if question.gpus <= question.machine.gpus else question.machine.gpus
    if question.gpus == base:
        return 1.0
    alone = replace(question, gpus=base, batch=question.batch // question.gpus * base)
    model = question.model
    if isinstance(model, Profile):
        both = [step(model.beside(one.gpus), work_of(one, model), one.machine) for one in (alone, question)]
    else:  # by the constants alone: two scales compare without the noise of measurements
        constants = _nearest_group(model.name, question, work_of(question, model))[1].constants
        both = [step(constants, work_of(one, model), one.machine) for one in (alone, question)]
    return both[0].total / both[1].total


def work_of(question: Question, model: Workload | Profile) -> Work:
    """What one step of a question with its batch filled in has to do."""
    each = question.batch // question.gpus
    micro = question.micro_batch or each
    if isinstance(model, Profile):
        gradients = model.gradients
    else:
        gradients = model.parameters * (2 if question.precision == "mixed" else 4)
    return Work(
        gpus=question.gpus,
        batch=micro,
        micro_batches=each // micro,
        precision=question.precision,
        gradients=gradients,
        serial=isinstance(model, Workload) and model.sequential,
    )

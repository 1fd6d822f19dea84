"""The known causes for which N workers train another model than one: what speaks for each in two records,
what removes it, and what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.verify.evidence import (
    Pair,
    averaging_removals,
    averaging_seen,
    averaging_why,
    clipping_removals,
    clipping_seen,
    initial_plan,
    initial_seen,
    initial_why,
    random_seen,
    rates_plan,
    rates_seen,
    rates_why,
    samples_plan,
    samples_seen,
    samples_why,
    tail_plan,
    tail_seen,
    uses,
    weighting_plan,
    weighting_seen,
)

__all__ = ["CAUSES", "METRIC", "METRIC_REMOVALS", "Cause"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One known cause.

    Attributes:
        name: its slug in ``verify.json``.
        title: as a line of the output.
        seen: what speaks for it in a pair; empty when nothing does, and removing it would change nothing.
        removals: interventions for a pair, each of which is an experiment of its own; tried in this order.
        plan: fields of the plans that the interventions need, for the run with one worker and the other.
        visible: whether ``seen`` is a difference of the runs in itself, which nothing else can remove.
        why: what it means, from the pair in which it was seen.
        fix: what to write.
    """

    name: str
    title: str
    seen: Callable[[Pair], str]
    removals: Callable[[Pair], tuple[str, ...]]
    why: Callable[[Pair], str]
    fix: str
    visible: bool = False
    plan: Callable[[Pair, Path], tuple[dict[str, Any], dict[str, Any]]] = field(
        default=lambda pair, folder: ({}, {})
    )


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="initial-parameters",
        title="different first parameters",
        seen=initial_seen,
        removals=lambda pair: ("initial-parameters",),
        plan=initial_plan,
        visible=True,
        why=initial_why,
        fix="Write hora.broadcast_parameters(model) before the loop, and seed the model by a fixed number, "
        "alike on every rank.",
    ),
    Cause(
        name="samples",
        title="sample order or overlap",
        seen=samples_seen,
        removals=lambda pair: ("samples",),
        plan=samples_plan,
        visible=True,
        why=samples_why,
        fix="Write hora.data_loader(dataset, global_batch=..., seed=...), or give each worker its own "
        "1/size of one global batch.",
    ),
    Cause(
        name="learning-rate",
        title="learning rate",
        seen=rates_seen,
        removals=lambda pair: ("learning-rate",),
        plan=rates_plan,
        visible=True,
        why=rates_why,
        fix="The rate belongs to the global batch: where that does not change with the workers, leave out "
        "hora.size(); where it grows, multiply once. Step schedules once per step of the optimizer.",
    ),
    Cause(
        name="averaging",
        title="gradients never averaged",
        seen=averaging_seen,
        removals=averaging_removals,
        why=averaging_why,
        fix="Write optimizer = hora.DistributedOptimizer(optimizer, model), and call backward() on what that "
        "model computed.",
    ),
    Cause(
        name="weighting",
        title="loss weights of unequal micro-batches",
        seen=weighting_seen,
        removals=lambda pair: ("weighting",),
        plan=weighting_plan,
        why=lambda pair: f"A mean of means: in step {pair.step + 1}, {weighting_seen(pair)}.",
        fix="Write the loss as a sum over the global count: F.cross_entropy(..., reduction='sum') / "
        "loader.samples_per_worker (for tokens: the global number of tokens / hora.size()).",
    ),
    Cause(
        name="tail",
        title="accumulation tail",
        seen=tail_seen,
        removals=lambda pair: ("tail",),
        plan=tail_plan,
        why=lambda pair: (
            f"The last, short accumulation window is divided by the full number of passes: {tail_seen(pair)}."
        ),
        fix="Divide by the number of passes that the window really has, or leave the short window out.",
    ),
    Cause(
        name="batch-norm",
        title="batch-norm statistics",
        seen=uses("batch norm"),
        removals=lambda pair: ("batch-norm",),
        why=lambda pair: (
            "Batch norm takes its statistics over each worker's own samples, not over the global batch."
        ),
        fix="Write model = hora.SyncBatchNorm.convert_sync_batchnorm(model) before the optimizer is made, or "
        "accept it: it is usual, and harmless where each worker has enough samples.",
    ),
    Cause(
        name="randomness",
        title="dropout or augmentation randomness",
        seen=random_seen,
        removals=lambda pair: ("randomness",),
        why=lambda pair: f"Random numbers are drawn per worker, not per sample ({random_seen(pair)}).",
        fix="Nothing is wrong with independent dropout. Augment inside the data set: hora.data_loader seeds "
        "each sample by its place in the training, whatever the number of workers.",
    ),
    Cause(
        name="clipping",
        title="clipping on local norms",
        seen=clipping_seen,
        removals=clipping_removals,
        why=lambda pair: (
            "Each worker clips its own gradient before the average, so that the sum is clipped by "
            "other norms than the global gradient's."
        ),
        fix="Clip between backward() and step() of a hora.DistributedOptimizer, when gradients are averaged "
        "already (with hvd: optimizer.synchronize() first).",
    ),
)

METRIC_REMOVALS = ("metric-weights", "metric-shares")
METRIC = Cause(
    name="metric",
    title="evaluation metric averages averages",
    seen=lambda pair: "",
    removals=lambda pair: METRIC_REMOVALS,
    why=lambda pair: "",
    fix="Give the number of samples as the weight: hora.mean(correct / count, weight=count), over a loader "
    "with shuffle=False, tail='uneven', which repeats no sample.",
)

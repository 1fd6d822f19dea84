"""Train the cells of a study that are left: what every worker of ``hora study batch-size`` runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

import hora.torch as hora
from hora.torch.optim import GradientNoise, polynomial, set_lr
from hora.workloads.resnet import data as images
from hora.workloads.resnet.config import PROFILES, Profile
from hora.workloads.resnet.learner import Learner, make_optimizer
from hora.workloads.study.directory import Result, StudyDirectory
from hora.workloads.study.plan import METHODS, Cell, Plan

__all__ = ["main", "train"]

MEASUREMENTS = 40
"""Of the noise scale, about, in one training."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is left, one cell after the other; each result is kept as soon as it is there.

    Raises:
        RunDirectoryError: the directory holds no study, or cannot be written.
        DataError: images that are missing or damaged.
    """
    parser = argparse.ArgumentParser(prog="python -m hora.workloads.study.train", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = StudyDirectory(parser.parse_args(argv).directory)
    hora.init()
    plan = directory.plan()
    results = directory.results()
    left = [cell for cell in plan.cells() if cell not in {result.cell for result in results}]
    data = images.load(_profile(plan, None).data)
    for number, cell in enumerate(left, start=len(plan.cells()) - len(left) + 1):
        equal = plan.equal(cell, [result.cell for result in results])
        if equal is None:
            result = train(plan, cell, data, place=f"{number} of {len(plan.cells())}")
        else:
            known = next(result for result in results if result.cell == equal)
            result = dataclasses.replace(known, cell=cell)
        results.append(result)
        if hora.rank() == 0:
            directory.add(result)


def train(plan: Plan, cell: Cell, data: images.Data, *, place: str = "") -> Result:
    """One training. Every rank calls it, and gets the same result."""
    started = time.perf_counter()
    profile = _profile(plan, cell)
    learner = Learner(profile, distributed=False)
    model = learner.model
    optimizer = hora.DistributedOptimizer(make_optimizer(profile.optimizer, model), model)
    learner.optimizer = optimizer
    hora.broadcast_parameters(model, root_rank=0)
    loader = hora.data_loader(
        (torch.arange(len(data.train)),),
        global_batch=cell.batch,
        micro_batch=min(plan.micro_batch, cell.batch // hora.size()),
        seed=cell.seed,
    )
    test = hora.data_loader(
        (torch.arange(len(data.test)),), global_batch=profile.eval_batch, shuffle=False, tail="uneven"
    )
    total = plan.epochs * len(loader)
    noise = GradientNoise(optimizer, global_batch=cell.batch, every=max(1, total // MEASUREMENTS))
    warmup = round(profile.optimizer.warmup_epochs * len(loader))
    losses: list[float] = []
    epoch: list[torch.Tensor] = []
    progress = hora.track(loader, epochs=plan.epochs)
    for share in progress:
        lr = polynomial(
            progress.step - 1, base=profile.optimizer.lr, end=0.0, warmup=warmup, total=total, power=2.0
        )
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        loss, seen = torch.zeros((), dtype=torch.float64), 0
        for (samples,) in share:
            batch = data.train.batch(samples.tolist(), seed=cell.seed, epoch=progress.epoch)
            loss += _backward(learner, batch) * len(samples)
            seen += len(samples)
        noise.update()
        optimizer.step()
        epoch.append(loss / max(seen, 1))
        if progress.step % len(loader) == 0:
            losses.append(hora.mean({"loss": torch.stack(epoch).mean()}, weight=1)["loss"])
            epoch.clear()
            progress.log(loss=losses[-1], lr=lr)
            if not math.isfinite(losses[-1]):
                break
    _, accuracy = learner.evaluate(data.test, test)
    progress.note(
        f"cell {place}: {METHODS[cell.method].title}, {cell.batch} samples per step, seed {cell.seed}: "
        f"accuracy {accuracy:.4f}"
    )
    return Result(
        cell=cell,
        accuracy=accuracy,
        losses=tuple(losses),
        steps=progress.step,
        lr=profile.optimizer.lr,
        noise_scale=noise.scale if math.isfinite(noise.scale) else None,
        finite=math.isfinite(losses[-1]),
        seconds=time.perf_counter() - started,
    )


def _backward(learner: Learner, batch: images.Batch) -> torch.Tensor:
    """The gradients of a micro-batch; its mean loss."""
    inputs, labels = learner.put(batch)
    with learner.autocast():
        logits = learner.model(inputs)
    loss = F.cross_entropy(logits.to(learner.stored), labels, label_smoothing=learner.profile.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach().double().cpu()


def _profile(plan: Plan, cell: Cell | None) -> Profile:
    chosen = PROFILES[plan.profile]
    model = chosen.model
    if plan.width is not None:
        widths = tuple(plan.width * 2**stage for stage in range(len(model.widths)))
        model = dataclasses.replace(model, stem_width=plan.width, widths=widths)
    path = None if plan.data is None else Path(plan.data)
    chosen = dataclasses.replace(chosen, model=model, data=dataclasses.replace(chosen.data, path=path))
    if cell is None:
        return chosen
    return dataclasses.replace(
        chosen,
        seed=cell.seed,
        epochs=plan.epochs,
        global_batch=cell.batch,
        optimizers=(plan.optimizer(cell),),
    )


if __name__ == "__main__":
    main()

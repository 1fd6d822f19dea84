"""What a training of a detector leaves in its run directory: summary, drawn detections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

import hora.torch as hora
from hora.core.plural import plural
from hora.core.rundir import disk_errors
from hora.workloads.loop import Outcome
from hora.workloads.scenes.batches import collate
from hora.workloads.scenes.draw import draw, png, side_by_side
from hora.workloads.scenes.learner import Detected, Learner
from hora.workloads.scenes.sample import Pictures, Sample

__all__ = ["drawings", "finish"]

SHOWN = 8
"""Test pictures with what was found in them, evenly over the test set."""
LEAST_SHOWN = 0.5
"""Score of the detections that are drawn; those below are many and mostly wrong."""
SIDE = 256
"""Pixels that small pictures are enlarged to, by a whole factor."""


def finish(learner: Learner, test: Pictures, outcome: Outcome, *, workload: str) -> None:
    """Write the summary and ``detections.json``; rank 0 does it, alone."""
    run = hora.context().run
    if run is None or hora.rank() != 0:
        return
    with disk_errors(run.path):
        text = json.dumps({"pictures": drawings(learner, test)}) + "\n"
        (run.path / "detections.json").write_text(text, encoding="utf-8")
    profile = learner.profile
    run.describe(
        summary={
            "workload": workload,
            "profile": profile.name,
            "targets": dict(profile.targets),
            "precision": dict(outcome.values),
            "reached": outcome.reached,
            "missed": "; ".join(outcome.missed),
            "epochs": outcome.epochs,
            "steps": outcome.steps,
            "time_to_train": outcome.time_to_train,
            "samples_per_second": outcome.samples_per_second,
            "data": "COCO 2017" if profile.data.kind == "coco" else "scenes of real photos",
            "workers": hora.size(),
        }
    )


def drawings(learner: Learner, test: Pictures) -> list[dict[str, Any]]:
    """Test pictures as PNG files: on the left what there is, on the right what was found."""
    numbers = np.unique(np.linspace(0, len(test) - 1, min(SHOWN, len(test))).astype(np.int64)).tolist()
    _, prepare = learner.transforms()
    masks = "segm" in learner.profile.targets
    samples = [prepare(test.sample(number, masks=masks)) for number in numbers]
    found = [learner.detect(collate([sample], multiple=learner.multiple))[0] for sample in samples]
    return [_drawing(sample, each, test.classes) for sample, each in zip(samples, found, strict=True)]


def _drawing(sample: Sample, found: Detected, classes: Sequence[str]) -> dict[str, Any]:
    height, width = sample.pixels.shape[:2]
    scale = max(1, SIDE // max(height, width))
    sure = found.scores >= LEAST_SHOWN
    masks = None if found.masks is None else found.masks[sure, :height, :width].cpu().numpy().astype(np.uint8)
    truth = draw(
        sample.pixels,
        boxes=sample.boxes,
        labels=sample.labels.tolist(),
        classes=classes,
        masks=sample.masks,
        scale=scale,
    )
    drawn = draw(
        sample.pixels,
        boxes=found.boxes[sure].float().cpu().numpy(),
        labels=found.labels[sure].tolist(),
        classes=classes,
        scores=found.scores[sure].double().cpu().numpy(),
        masks=masks,
        scale=scale,
    )
    there, seen = len(sample.labels), int(sure.sum())
    text = f"{there} {plural(there, 'object')}, {seen} found with at least {LEAST_SHOWN:.0%}"
    return {"png": png(side_by_side([truth, drawn])), "text": text}

"""SSD: default boxes, matching, the loss, detections, sizes; golden losses over any number of workers.

``python -m tests.workloads.test_ssd`` writes the golden losses again; do so only when a change is meant to
change them, and say why in the commit.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.errors import TrainingError
from hora.mlperf import MLPerfLog
from hora.workloads.loop import Outcome, check_finite
from hora.workloads.scenes.batches import Batch, Prepared, collate, normalize
from hora.workloads.scenes.compose import load
from hora.workloads.scenes.config import DataConfig, SceneConfig, Schedule
from hora.workloads.scenes.evaluate import evaluate
from hora.workloads.scenes.loop import loaders, train
from hora.workloads.scenes.record import drawings
from hora.workloads.scenes.sample import Sample
from hora.workloads.ssd import augment
from hora.workloads.ssd.anchors import WEIGHTS, default_boxes, match
from hora.workloads.ssd.config import PROFILES, SMALL, SSD300, SSDProfile
from hora.workloads.ssd.learner import SSDLearner
from hora.workloads.ssd.loss import detections, loss
from hora.workloads.ssd.model import SSD

GOLDEN = Path(__file__).parents[1] / "golden" / "ssd.json"
STEPS = 4
TINY = dataclasses.replace(
    SMALL,
    side=64,
    widths=(8, 16, 32),
    outputs=(32, 32, 32),
    inner=(16, 16),
    maps=(8, 4, 2),
    strides=(8, 16, 32),
    scales=(18, 32, 48, 70),
    ratios=((2, 3), (2, 3), (2, 3)),
)
PROFILE = dataclasses.replace(
    PROFILES["quick"],
    global_batch=4,
    eval_batch=5,
    model=TINY,
    data=DataConfig(scenes=SceneConfig(side=64, smallest=24, largest=40, train=8, test=7), loaders=0),
    schedule=Schedule(lr=0.02, weight_decay=5e-4, warmup_steps=1, decay_at=()),
    crop=0.5,
    jitter=(0.125, 0.5, 0.5, 0.05),
)


def test_the_reference_has_8732_default_boxes_and_20_million_parameters() -> None:
    boxes = default_boxes(SSD300)
    assert [cells**2 * count for cells, count in zip(SSD300.maps, SSD300.per_cell, strict=True)] == [
        *(5776, 2166, 600, 150, 36, 4)
    ]
    assert len(boxes) == 8732
    with torch.device("meta"):
        model = SSD(SSD300)
        places, logits = model(torch.zeros(1, 3, 300, 300))
    assert (places.shape, logits.shape) == ((1, 8732, 4), (1, 8732, 81))

    def block(inner: int, outer: int) -> int:
        # Two 3x3 convolutions with two numbers per channel behind each, and a projection if they differ.
        return 9 * (inner + outer) * outer + 4 * outer + (inner * outer + 2 * outer if inner != outer else 0)

    backbone = 3 * 64 * 49 + 128 + 3 * block(64, 64)
    backbone += block(64, 128) + 3 * block(128, 128) + block(128, 256) + 5 * block(256, 256)
    further, heads = 0, 0
    for before, inner, after in zip(SSD300.outputs, SSD300.inner, SSD300.outputs[1:], strict=False):
        further += (before + 1) * inner + (9 * inner + 1) * after
    for channels, count in zip(SSD300.outputs, (4, 6, 6, 6, 4, 4), strict=True):
        heads += (9 * channels + 1) * count * 85
    assert backbone == 8_170_304  # ResNet-34's 21.8 million without its last stage and classifier
    assert sum(each.numel() for each in model.parameters()) == backbone + further + heads == 19_972_534


def test_default_boxes_on_paper() -> None:
    boxes = default_boxes(SSD300) * 300
    between = math.sqrt(21 * 45)
    wide, high = 21 * math.sqrt(2), 21 / math.sqrt(2)
    for row, (width, height) in enumerate(((21, 21), (between, between), (wide, high), (high, wide))):
        expected = [4 - width / 2, 4 - height / 2, 4 + width / 2, 4 + height / 2]
        assert boxes[row].tolist() == pytest.approx(expected, rel=1e-5)
    assert boxes[4].tolist() == pytest.approx([12 - 10.5, -6.5, 22.5, 14.5], rel=1e-4)  # the next column
    assert boxes[-4].tolist() == pytest.approx([150 - 130.5, 19.5, 280.5, 280.5], rel=1e-4)  # the last map
    assert len(default_boxes(SMALL)) == (256 + 64) * 4


def test_each_object_gets_its_best_box_and_boxes_above_half_get_theirs() -> None:
    anchors = torch.tensor([[0, 0, 0.4, 0.4], [0, 0, 0.4, 0.3], [0.5, 0.5, 1, 1], [0.5, 0, 0.6, 0.1]])
    objects = torch.tensor([[0, 0, 0.4, 0.35], [0.5, 0, 1, 0.5]])  # overlap 0.875, 0.857, 0, ...; 0.04
    boxes, classes = match(
        [objects, torch.zeros(0, 4)], [torch.tensor([4, 7]), torch.zeros(0, dtype=torch.long)], anchors
    )
    assert classes.tolist() == [[5, 5, 0, 8], [0, 0, 0, 0]]
    torch.testing.assert_close(boxes[0], torch.stack((objects[0], objects[0], anchors[2], objects[1])))
    assert torch.equal(boxes[1], anchors)


def reference_loss(
    places: Any, logits: Any, boxes: Any, classes: Any, anchors: Any, *, negatives: int
) -> float:
    total = 0.0
    for picture in range(len(places)):
        entropies, place_loss, count = [], 0.0, 0
        for row, anchor in enumerate(anchors):
            exponents = np.exp(logits[picture, row] - logits[picture, row].max())
            kind = classes[picture, row]
            entropies.append(-np.log(exponents[kind] / exponents.sum()))
            if kind == 0:
                continue
            count += 1
            left, top, right, bottom = boxes[picture, row]
            width, height = anchor[2] - anchor[0], anchor[3] - anchor[1]
            wanted = (
                10 * ((left + right) / 2 - (anchor[0] + anchor[2]) / 2) / width,
                10 * ((top + bottom) / 2 - (anchor[1] + anchor[3]) / 2) / height,
                5 * math.log((right - left) / width),
                5 * math.log((bottom - top) / height),
            )
            for said, want in zip(places[picture, row], wanted, strict=True):
                off = abs(said - want)
                place_loss += off**2 / 2 if off < 1 else off - 0.5
        if count:
            hard = sorted(entropies[row] for row in range(len(anchors)) if not classes[picture, row])[::-1]
            found = sum(entropies[row] for row in range(len(anchors)) if classes[picture, row])
            total += (place_loss + found + sum(hard[: negatives * count])) / count
    return total / len(places)


def test_the_loss_against_loops_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = default_boxes(dataclasses.replace(TINY, maps=(2, 2, 1))).double()
    objects = [
        torch.tensor([[0.0, 0.0, 0.3, 0.3], [0.2, 0.1, 0.5, 0.6]]).double(),
        torch.zeros(0, 4).double(),
    ]
    boxes, classes = match(objects, [torch.tensor([1, 3]), torch.zeros(0, dtype=torch.long)], anchors)
    places = torch.randn(2, len(anchors), 4, generator=generator, dtype=torch.float64)
    logits = 2 * torch.randn(2, len(anchors), 5, generator=generator, dtype=torch.float64)
    for negatives in (3, 1, 1000):
        said = loss(places, logits, boxes, classes, anchors=anchors, negatives=negatives)
        parts = [part.numpy() for part in (places, logits, boxes, classes, anchors)]
        assert said.item() == pytest.approx(reference_loss(*parts, negatives=negatives), rel=1e-12)
    nothing = loss(places[1:], logits[1:], boxes[1:], classes[1:], anchors=anchors, negatives=3)
    assert nothing.item() == 0.0


def test_detections_undo_what_is_to_be_learned() -> None:
    anchors = default_boxes(TINY)
    objects = torch.tensor([[0.1, 0.2, 0.5, 0.7], [0.5, 0.5, 0.9, 0.8]])
    boxes, classes = match([objects], [torch.tensor([2, 9])], anchors)
    from hora.workloads.scenes.boxes import encode

    logits = 12.0 * torch.nn.functional.one_hot(classes, 11).float()
    logits[0, classes[0] == 0, 0] = 12
    places = encode(boxes, anchors, WEIGHTS)
    ((found, labels, scores),) = detections(places, logits, anchors=anchors, suppression=0.5, most=50)
    assert sorted(labels.tolist()) == [2, 9]  # many default boxes found each; one of them is left
    torch.testing.assert_close(found[labels.argsort()], objects, rtol=1e-4, atol=1e-4)
    assert (scores > 0.99).all()


def sample_of(side: int) -> Sample:
    pixels = np.zeros((side, side, 3), dtype=np.uint8)
    pixels[10:20, 30:50] = (200, 100, 50)
    return Sample(
        number=0,
        pixels=pixels,
        boxes=np.array([[30, 10, 50, 20]], dtype=np.float32),
        labels=np.array([3]),
    )


def test_augmentation_moves_boxes_with_their_objects() -> None:
    np.random.seed(0)
    shapes = set()
    for _ in range(60):
        sample = augment.crop(sample_of(64))
        shapes.add(sample.pixels.shape)
        for changed in (sample, augment.mirror(sample), augment.resize(sample, 64)):
            (left, top, right, bottom) = np.round(changed.boxes[0]).astype(int)
            bright = changed.pixels.sum(axis=2) > 175
            assert changed.labels.tolist() == [3]
            # What shows of the object fills its box, up to the soft edges that scaling makes.
            assert bright[top:bottom, left:right].mean() > 0.9
            assert bright.sum() <= 1.1 * (bottom - top) * (right - left) + 30
    assert len(shapes) > 30
    coloured = augment.jitter(sample_of(64), (0.125, 0.5, 0.5, 0.05))
    assert coloured.pixels.shape == (64, 64, 3)
    assert (coloured.pixels != sample_of(64).pixels).any()
    assert augment.jitter(sample_of(64), (0, 0, 0, 0)).pixels.tolist() == sample_of(64).pixels.tolist()


def test_one_real_step_of_ssd300() -> None:
    """One picture of 300 pixels in float32: all parameters get a gradient, and it is finite."""
    torch.manual_seed(0)
    model = SSD(SSD300).to(memory_format=torch.channels_last)
    anchors = default_boxes(SSD300)
    pixels = torch.randint(0, 255, (1, 300, 300, 3), dtype=torch.uint8)
    wanted = match([torch.tensor([[0.1, 0.1, 0.6, 0.5]])], [torch.tensor([17])], anchors)
    value = loss(*model(normalize(pixels, torch.float32)), *wanted, anchors=anchors, negatives=3)
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(value)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def first_losses(profile: SSDProfile) -> tuple[list[float], dict[str, float]]:
    """Losses over the global batch of the first steps, and the precision then; statistics are held still."""
    learner = SSDLearner(profile, dtype=torch.float64)
    train, test = load(profile.data.scenes)
    learner.model.eval()  # batch normalization would see each worker's part of the batch
    loader, test_loader = loaders(learner, train, test)
    losses = []
    while len(losses) < STEPS:
        for batch in loader:
            values = learner.step(batch, lr=profile.schedule.at(len(losses), steps_per_epoch=2), epoch=0)
            losses.append(hora.mean(values["loss"], weight=len(batch.numbers)))
    return losses[:STEPS], evaluate(learner, test, test_loader)


@pytest.mark.parametrize("size", [1, 2])
def test_golden_losses(size: int) -> None:
    # Loader processes change nothing either.
    profile = dataclasses.replace(PROFILE, data=dataclasses.replace(PROFILE.data, loaders=size - 1))
    results = run_ranks(size, first_losses, profile)
    assert all(result == results[0] for result in results)
    losses, precision = results[0]
    expected = json.loads(GOLDEN.read_text())
    # Weights may start differently where torch draws them from other random numbers.
    assert losses == pytest.approx(expected["losses"], rel=1e-9)
    assert precision["bbox"] == pytest.approx(expected["bbox"], abs=1e-9)


def train_twice(profile: SSDProfile) -> tuple[Outcome, Outcome, list[dict[str, Any]]]:
    """Once to a target that anything reaches, once to one that nothing does."""
    outcomes = []
    for target in (0.0, 1.0):
        aimed = dataclasses.replace(profile, targets={"bbox": target}, epochs=2)
        learner = SSDLearner(aimed)
        train_pictures, test = load(aimed.data.scenes)
        outcomes.append(train(learner, train_pictures, test, MLPerfLog(None), started=0.0))
    return outcomes[0], outcomes[1], drawings(learner, test)


def test_a_training_ends_with_its_target_or_with_its_epochs() -> None:
    results = run_ranks(2, train_twice, PROFILE)
    for reached, missed, drawn in results:
        assert (reached.reached, reached.epochs, reached.steps) == (True, 1, 2)
        assert (missed.reached, missed.epochs, missed.steps) == (False, 2, 4)
        assert missed.values == results[0][1].values
        assert missed.missed == [f"bbox {missed.values['bbox']:.4f} is below 1.0"]
        assert reached.missed == []
        assert len(drawn) == 7
        assert all(base64.b64decode(each["png"]).startswith(b"\x89PNG") for each in drawn)


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(TrainingError, match="up to step 7 is nan, at learning rate 0.5"):
        check_finite(math.nan, step=7, lr=0.5)


def memorize(profile: SSDProfile) -> dict[str, float]:
    learner = SSDLearner(profile)
    train, _ = load(profile.data.scenes)
    _, transform = learner.transforms()
    prepared = Prepared(train, transform, masks=False)
    batch: Batch = collate([prepared[number] for number in range(4)])
    for step in range(100):
        learner.step(batch, lr=0.02 * min(1, (step + 1) / 10) * (0.1 if step >= 75 else 1), epoch=0)
    return evaluate(learner, train, [batch])


def test_a_handful_of_scenes_is_learned_by_heart() -> None:
    assert run_ranks(1, memorize, PROFILE)[0]["bbox"] > 0.95


if __name__ == "__main__":
    golden_losses, golden_precision = run_ranks(1, first_losses, PROFILE)[0]
    GOLDEN.write_text(json.dumps({"losses": golden_losses, **golden_precision}, indent=2) + "\n")

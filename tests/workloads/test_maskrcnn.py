"""Mask R-CNN: anchors, sampling, proposals, losses, sizes; golden losses over any number of workers.

``python -m tests.workloads.test_maskrcnn`` writes the golden losses again; do so only when a change is meant
to change them, and say why in the commit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.errors import DataError
from hora.workloads.maskrcnn.augment import Prepare, scale
from hora.workloads.maskrcnn.backbone import FrozenBatchNorm, make_backbone
from hora.workloads.maskrcnn.config import PROFILES, R50_FPN, SMALL, MaskRCNNProfile, RPNConfig
from hora.workloads.maskrcnn.heads import box_losses, mask_loss, pool
from hora.workloads.maskrcnn.learner import MaskRCNNLearner
from hora.workloads.maskrcnn.model import MaskRCNN, Objects
from hora.workloads.maskrcnn.rpn import RPN, WEIGHTS, anchors_of
from hora.workloads.maskrcnn.sampling import chance, choose, match
from hora.workloads.scenes.batches import Prepared, collate
from hora.workloads.scenes.boxes import encode
from hora.workloads.scenes.compose import load
from hora.workloads.scenes.config import DataConfig, SceneConfig, Schedule
from hora.workloads.scenes.evaluate import evaluate
from hora.workloads.scenes.learner import make_optimizer, set_rate
from hora.workloads.scenes.loop import loaders
from hora.workloads.scenes.sample import Sample
from hora.workloads.scenes.weights import load_backbone
from hora.workloads.ssd.model import resnet34

GOLDEN = Path(__file__).parents[1] / "golden" / "maskrcnn.json"
STEPS = 4
TINY = dataclasses.replace(
    SMALL,
    widths=(8, 16, 24, 32),
    channels=16,
    rpn=dataclasses.replace(SMALL.rpn, sampled=32, before=(60, 40), after=(40, 20)),
    heads=dataclasses.replace(SMALL.heads, hidden=64, mask_channels=(16, 16), sampled=24),
)
PROFILE = dataclasses.replace(
    PROFILES["quick"],
    global_batch=4,
    eval_batch=5,
    model=TINY,
    data=DataConfig(scenes=SceneConfig(side=64, smallest=24, largest=40, train=8, test=7), loaders=0),
    schedule=Schedule(lr=0.02, weight_decay=1e-4, warmup_steps=1, decay_at=()),
)


def test_the_reference_has_44_million_parameters() -> None:
    with torch.device("meta"):
        model = MaskRCNN(R50_FPN)

    def stage(channels: int, inner: int, depth: int) -> int:
        # 1x1, 3x3, 1x1 without biases; normalizations are frozen and hold no parameters.
        first = channels * inner + 9 * inner**2 + 4 * inner**2 + 4 * channels * inner
        return first + (depth - 1) * (4 * inner**2 + 9 * inner**2 + 4 * inner**2)

    backbone = 3 * 64 * 49 + stage(64, 64, 3) + stage(256, 128, 4) + stage(512, 256, 6)
    backbone += stage(1024, 512, 3)
    pyramid = sum(256 * channels + 256 for channels in (256, 512, 1024, 2048)) + 4 * (9 * 256**2 + 256)
    rpn = 9 * 256**2 + 256 + 257 * 3 + 257 * 12
    box = 256 * 49 * 1024 + 1024 + 1024**2 + 1024 + 1025 * 81 + 1025 * 4 * 81
    mask = 4 * (9 * 256**2 + 256) + 4 * 256**2 + 256 + 257 * 80
    assert backbone == 23_454_912  # ResNet-50's 25,557,032 without classifier and normalizations
    total = backbone + pyramid + rpn + box + mask
    assert sum(each.numel() for each in model.parameters()) == total == 44_347_316
    # torchvision's has outputs for 90 categories and nothing, for masks too: its published number.
    assert total + 10 * 1025 * 5 + 11 * 257 == 44_401_393
    learned = [name for name, value in model.named_parameters() if value.requires_grad]
    assert not any(name.startswith(("backbone.stem", "backbone.stages.0")) for name in learned)
    assert any(name.startswith("backbone.stages.1") for name in learned)


def test_normalization_adds_its_numbers_to_the_small_network_and_none_to_the_reference() -> None:
    assert not R50_FPN.norm
    assert not R50_FPN.heads.norm
    plain = dataclasses.replace(SMALL, norm=False, heads=dataclasses.replace(SMALL.heads, norm=False))
    with torch.device("meta"):
        counts = [sum(each.numel() for each in MaskRCNN(config).parameters()) for config in (plain, SMALL)]
    # Two numbers per unit of the box head's two layers; scale and shift for the bias of six convolutions.
    assert counts[1] - counts[0] == 2 * 2 * 256 + 6 * (2 * 48 - 48)
    assert counts[1] == 1_265_944


def torchvision_names(model: torch.nn.Module, depths: tuple[int, ...], convs: int) -> dict[str, torch.Tensor]:
    """A state dict as torchvision's ResNet has it, of this backbone's shapes but other values."""
    names = ["conv1", "bn1"]
    for stage, depth in enumerate(depths):
        for block in range(depth):
            parts = [f"{kind}{index + 1}" for index in range(convs) for kind in ("conv", "bn")]
            # A block that changes the number of channels, or the size, has a projection.
            projected = block == 0 and (stage > 0 or convs == 3)
            parts += ["downsample.0", "downsample.1"] if projected else []
            names += [f"layer{stage + 1}.{block}.{part}" for part in parts]
    found: dict[str, torch.Tensor] = {}
    shapes = [value.shape for name, value in model.state_dict().items() if "num_batches" not in name]
    for index, name in enumerate(names):
        kinds = ("weight", "bias", "running_mean", "running_var") if index % 2 else ("weight",)
        for kind in kinds:
            found[f"{name}.{kind}"] = torch.rand(shapes[len(found)])
    assert len(found) == len(shapes)
    return found | {"bn1.num_batches_tracked": torch.tensor(3), "fc.weight": torch.rand(1000, 4)}


def test_backbones_start_from_the_weights_of_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "resnet.pth"
    for backbone, depths, convs in ((make_backbone(R50_FPN), (3, 4, 6, 3), 3), (resnet34(), (3, 4, 6), 2)):
        saved = torchvision_names(backbone, depths, convs)
        torch.save(saved, path)
        load_backbone(backbone, path)
        last = backbone.state_dict()["stages.2.5.norm3.running_var" if convs == 3 else "16.norm2.running_var"]
        torch.testing.assert_close(last, saved[f"layer3.5.bn{convs}.running_var"])
    torch.save(saved | {"layer1.0.conv1.weight": torch.zeros(2, 3)}, path)
    with pytest.raises(DataError, match=r"layer1.0.conv1.weight has the shape \(2, 3\), but 4.conv1.weight"):
        load_backbone(resnet34(), path)
    torch.save({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="has 1 entries"):
        load_backbone(resnet34(), path)
    path.write_bytes(b"no weights")
    with pytest.raises(DataError, match="is no file of weights"):
        load_backbone(resnet34(), path)
    with pytest.raises(DataError, match="cannot be read"):
        load_backbone(resnet34(), tmp_path / "missing")


def test_biases_learn_twice_as_fast_and_do_not_decay() -> None:
    model = MaskRCNN(TINY)
    optimizer = make_optimizer(model, PROFILES["reference"].schedule)
    set_rate(optimizer, 0.3)
    values = {
        id(value): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for value in group["params"]
    }
    assert values[id(model.rpn.conv.weight)] == (0.3, 1e-4)
    assert values[id(model.rpn.conv.bias)] == (0.6, 0.0)
    assert len(values) == len(list(model.parameters()))


def test_the_schedule_of_the_reference() -> None:
    schedule, steps = PROFILES["reference"].schedule, 117_266 // 16
    assert schedule.at(0, steps_per_epoch=steps) == pytest.approx(0.02 / 500)
    assert schedule.at(500, steps_per_epoch=steps) == 0.02
    for decay, rate in ((60_000, 0.002), (80_000, 0.0002)):
        assert schedule.at(round(1.01 * decay), steps_per_epoch=steps) == pytest.approx(rate)
        assert schedule.at(round(0.99 * decay), steps_per_epoch=steps) == pytest.approx(10 * rate)


def test_frozen_normalization() -> None:
    frozen, normal = FrozenBatchNorm(3), torch.nn.BatchNorm2d(3)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = torch.rand(3) + 0.5
            getattr(normal, name).copy_(value)
            frozen.get_buffer(name).copy_(value)
    features = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(frozen(features), normal.eval()(features))
    assert not list(frozen.parameters())


def test_anchors_on_paper() -> None:
    config = RPNConfig(sizes=(32, 64), ratios=(0.5, 1.0, 2.0))
    first, second = anchors_of(config, [torch.zeros(1, 8, 3, 5), torch.zeros(1, 8, 2, 3)], first_level=2)
    assert (first.shape, second.shape) == ((45, 4), (18, 4))
    # The last anchor of the second cell of the first row: height over width is 2, area 32 squared.
    wide, high = 32 / math.sqrt(2), 32 * math.sqrt(2)
    expected = [6 - wide / 2, 2 - high / 2, 6 + wide / 2, 2 + high / 2]
    assert first[5].tolist() == pytest.approx(expected, rel=1e-6)
    assert second[-2].tolist() == [20 - 32, 12 - 32, 20 + 32, 12 + 32]


def test_matching_on_paper() -> None:
    objects = torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    boxes = torch.tensor([[0.0, 0, 10, 8], [0, 0, 10, 5], [0, 0, 10, 2], [50, 50, 60, 52], [80, 80, 90, 90]])
    which, kind = match(boxes, objects, positive=0.7, negative=0.3, best_too=True)
    assert kind.tolist() == [1, -1, 0, 1, 0]  # overlaps 0.8, 0.5, 0.2, 0.2 (the best of its object), 0
    assert which[[0, 3]].tolist() == [0, 1]
    assert match(boxes, objects, positive=0.5, negative=0.5, best_too=False)[1].tolist() == [1, 1, 0, 0, 0]
    assert match(boxes, objects[:0], positive=0.5, negative=0.5, best_too=True)[1].tolist() == [0] * 5


def test_chance_belongs_to_the_picture_and_choice_keeps_its_limits() -> None:
    numbers = torch.tensor([5, 9, 1])
    together = chance(numbers, 400, seed=3, epoch=2)
    assert torch.equal(chance(numbers[1:2], 400, seed=3, epoch=2)[0], together[1])
    assert not torch.equal(chance(numbers, 400, seed=3, epoch=3), together)
    kind = torch.full((3, 400), -1, dtype=torch.int8)
    kind[0, :100], kind[0, 100:300] = 1, 0
    kind[1, :5], kind[1, 100:300] = 1, 0
    kind[2, :3], kind[2, 10:14] = 1, 0
    positive, negative = choose(kind, together, number=64, positive_part=0.25)
    assert positive.sum(dim=1).tolist() == [16, 5, 3]
    assert negative.sum(dim=1).tolist() == [48, 59, 4]
    assert (kind[positive] == 1).all()
    assert (kind[negative] == 0).all()
    lowest = together[0, :100].argsort()[:16]
    assert positive[0, lowest].all()


def rpn_inputs() -> tuple[RPN, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    rpn = RPN(dataclasses.replace(TINY.rpn, sizes=(18, 32)), 8).double()
    levels = [torch.randn(2, 8, 8, 8, dtype=torch.float64), torch.randn(2, 8, 4, 4, dtype=torch.float64)]
    logits, differences = rpn(levels)
    return rpn, logits, differences, anchors_of(rpn.config, levels, first_level=3)


def test_the_loss_of_proposals_against_loops() -> None:
    rpn, logits, differences, anchors = rpn_inputs()
    objects = [torch.tensor([[8.0, 10, 30, 24], [20, 30, 60, 55]]).double(), torch.zeros(0, 4).double()]
    sizes = torch.tensor([[64, 64], [64, 48]])
    places = torch.cat(anchors)
    chances = chance(torch.tensor([0, 1]), len(places), seed=1, epoch=0)
    said = rpn.loss(logits, differences, anchors, objects, sizes=sizes, chances=chances)
    flat = torch.cat(logits, dim=1), torch.cat(differences, dim=1)
    expected_object, expected_place = 0.0, 0.0
    for picture in range(2):
        which, kind = match(places, objects[picture], positive=0.7, negative=0.3, best_too=True)
        height, width = sizes[picture].tolist()
        inside = [
            index
            for index, (left, top, right, bottom) in enumerate(places.tolist())
            if left >= 0 and top >= 0 and right <= width and bottom <= height
        ]
        by_luck = sorted(inside, key=lambda index: chances[picture, index].item())
        positive = [index for index in by_luck if kind[index] == 1][:16]
        negative = [index for index in by_luck if kind[index] == 0][: 32 - len(positive)]
        count = len(positive) + len(negative)
        assert count > 20
        for index in positive + negative:
            probability = 1 / (1 + math.exp(-flat[0][picture, index].item()))
            right = probability if index in positive else 1 - probability
            expected_object -= math.log(right) / count / 2
        for index in positive:
            wanted = encode(objects[picture][which[index]], places[index], WEIGHTS)
            for off in (flat[1][picture, index] - wanted).abs().tolist():
                expected_place += (4.5 * off**2 if off < 1 / 9 else off - 1 / 18) / count / 2
    assert said[0].item() == pytest.approx(expected_object, rel=1e-10)
    assert said[1].item() == pytest.approx(expected_place, rel=1e-10)
    assert expected_place > 0


def test_proposals_are_the_best_that_are_left_inside_the_picture() -> None:
    rpn, logits, differences, anchors = rpn_inputs()
    wanted = torch.tensor([10.0, 12, 30, 28], dtype=torch.float64)
    # One anchor says where it is, with more confidence than all others; another one does with less.
    for index, confidence in ((70, 9.0), (71, 8.0)):
        with torch.no_grad():
            logits[0][0, index] = confidence
            differences[0][0, index] = encode(wanted, anchors[0][index], WEIGHTS)
    sizes = torch.tensor([[64, 64], [20, 64]])
    boxes, there = rpn.propose(logits, differences, anchors, sizes)
    torch.testing.assert_close(boxes[0, 0], wanted)
    assert not (boxes[0, 1:] - wanted).abs().sum(dim=1).lt(1).any()  # the other one was suppressed
    assert boxes.shape == (2, 40, 4)
    assert (boxes[1, there[1]][:, 3] <= 20).all()
    assert (boxes[there][:, 2:] > boxes[there][:, :2]).all()


def test_regions_come_from_their_level_and_keep_their_order() -> None:
    # Each level holds its own number everywhere.
    pyramid = [torch.full((2, 16, 64 // 2**level, 64 // 2**level), float(level)) for level in (2, 3, 4)]
    sides = [[10.0, 40.0, 63.0, 20.0], [33.0]]
    boxes = [torch.tensor([[0, 0, side, side] for side in each]) for each in sides]
    found = pool(pyramid, boxes, cells=7, config=TINY)
    # Level 3 from 32 pixels on, level 4 from 64 on.
    assert found[:, 0, 3, 3].tolist() == [2, 3, 3, 2, 3]
    assert found.shape == (5, 16, 7, 7)


def test_losses_of_heads_on_paper() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    differences = torch.zeros(2, 2, 4)
    differences[0, 1] = torch.tensor([0.5, 3.0, 0.0, 0.0])
    kinds, wanted = torch.tensor([1, 0]), torch.zeros(2, 4)
    class_loss, box_loss = box_losses(logits, differences, kinds, wanted, torch.tensor([0.25, 0.75]))
    assert class_loss.item() == pytest.approx(-0.25 * math.log(3 / 4) - 0.75 * math.log(1 / 2))
    assert box_loss.item() == pytest.approx(0.25 * (0.125 + 2.5))
    masks = torch.zeros(1, 3, 2, 2)
    masks[0, 2, 0, 0] = math.log(3.0)
    said = mask_loss(masks, torch.tensor([2]), torch.tensor([[[1.0, 1], [0, 0]]]), torch.tensor([0.5]))
    assert said.item() == pytest.approx(0.5 * (-math.log(3 / 4) - 3 * math.log(1 / 2)) / 4)


def test_pictures_are_scaled_with_their_boxes_and_masks() -> None:
    masks = np.zeros((1, 30, 60), dtype=np.uint8)
    masks[0, 10:20, 10:40] = 1
    sample = Sample(
        number=0,
        pixels=np.repeat(masks[0, :, :, None] * np.uint8(200), 3, axis=2),
        boxes=np.array([[10, 10, 40, 20]], dtype=np.float32),
        labels=np.array([1]),
        masks=masks,
    )
    larger = scale(sample, short=90, long=1000)
    assert larger.pixels.shape == (90, 180, 3)
    assert larger.boxes.tolist() == [[30, 30, 120, 60]]
    assert larger.masks is not None
    assert larger.masks[0, 30:60, 30:120].all()
    assert larger.masks.sum() == 30 * 90
    assert scale(sample, short=90, long=120).pixels.shape == (60, 120, 3)
    np.random.seed(1)
    seen = {Prepare(PROFILE, training=True)(sample).boxes[0, 0] for _ in range(20)}
    assert seen == {10, 20}
    assert Prepare(PROFILE, training=False)(sample) is sample


def test_one_real_step_of_r50_fpn() -> None:
    """Two pictures of 128 x 96 pixels in float32: all parameters that learn get a finite gradient."""
    torch.manual_seed(0)
    heads = dataclasses.replace(R50_FPN.heads, sampled=32)
    rpn = dataclasses.replace(R50_FPN.rpn, before=(200, 100), after=(60, 30))
    model = MaskRCNN(dataclasses.replace(R50_FPN, heads=heads, rpn=rpn))
    masks = torch.zeros(1, 128, 96, dtype=torch.uint8)
    masks[0, 20:80, 10:70] = 1
    objects = Objects(
        boxes=[torch.tensor([[10.0, 20, 70, 80]])] * 2, labels=[torch.tensor([79])] * 2, masks=[masks] * 2
    )
    sizes = torch.tensor([[128, 96], [100, 90]])
    losses = model(torch.randn(2, 3, 128, 96), sizes, objects, torch.tensor([0, 1]), seed=1, epoch=0)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    assert set(losses) == {"object", "place", "class", "box", "mask"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
    model.eval()
    found = model.detect(torch.randn(1, 3, 128, 96), sizes[:1])[0]
    assert found.masks.shape == (len(found.boxes), 28, 28)


def test_no_region_at_all_is_no_detection_at_all() -> None:
    model = MaskRCNN(TINY).eval()
    empty = [torch.zeros(0, 4)]
    pyramid = [torch.zeros(1, 16, 64 // 2**level, 64 // 2**level) for level in (2, 3, 4)]
    logits, differences = model.box_head(pool(pyramid, empty, cells=7, config=TINY))
    assert (logits.shape, differences.shape) == ((0, 11), (0, 11, 4))
    # A picture whose proposals are all empty, because none of it is there.
    (found,) = model.detect(torch.zeros(1, 3, 64, 64), torch.zeros(1, 2, dtype=torch.long))
    assert (found.boxes.shape, found.masks.shape) == ((0, 4), (0, 28, 28))


def first_losses(profile: MaskRCNNProfile) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Losses over the global batch of the first steps, and the precision then; statistics are held still."""
    learner = MaskRCNNLearner(profile, dtype=torch.float64)
    train, test = load(profile.data.scenes)
    for module in learner.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()  # it would see each worker's part of the batch
    loader, test_loader = loaders(learner, train, test)
    losses = []
    while len(losses) < STEPS:
        for batch in loader:
            lr = profile.schedule.at(len(losses), steps_per_epoch=2)
            values = learner.step(batch, lr=lr, epoch=loader.epoch)
            losses.append(hora.mean(dict(values), weight=len(batch.numbers)))
    return losses[:STEPS], evaluate(learner, test, test_loader)


@pytest.mark.parametrize("size", [1, 2])
def test_golden_losses(size: int) -> None:
    results = run_ranks(size, first_losses, PROFILE)
    assert all(result == results[0] for result in results)
    losses, precision = results[0]
    expected = json.loads(GOLDEN.read_text())
    for mine, golden in zip(losses, expected["losses"], strict=True):
        assert mine == pytest.approx(golden, rel=1e-8)
    assert precision == pytest.approx(expected["precision"], abs=1e-9)


def memorize(profile: MaskRCNNProfile) -> dict[str, float]:
    learner = MaskRCNNLearner(profile)
    train, _ = load(profile.data.scenes)
    _, transform = learner.transforms()
    prepared = Prepared(train, transform, masks=True)
    batch = collate([prepared[number] for number in range(2)])
    for step in range(140):
        rate = 0.03 * min(1, (step + 1) / 10) * (0.1 if step >= 110 else 1)
        learner.step(batch, lr=rate, epoch=step)
    return evaluate(learner, train, [batch])


def test_a_handful_of_scenes_is_learned_by_heart() -> None:
    precision = run_ranks(1, memorize, PROFILE)[0]
    assert precision["bbox"] > 0.9
    assert precision["segm"] > 0.65


if __name__ == "__main__":
    golden_losses, golden_precision = run_ranks(1, first_losses, PROFILE)[0]
    GOLDEN.write_text(json.dumps({"losses": golden_losses, "precision": golden_precision}, indent=2) + "\n")

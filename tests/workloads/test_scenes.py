"""Scenes and COCO folders: what is in them, their ground truth, and average precision."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.errors import DataError, MissingExtraError
from hora.workloads.maskrcnn import config as maskrcnn
from hora.workloads.maskrcnn.augment import Prepare
from hora.workloads.scenes import compose, data, photos, truth
from hora.workloads.scenes.batches import Batch, Prepared, collate
from hora.workloads.scenes.coco import CocoPictures
from hora.workloads.scenes.compose import Scenes, boxes_of
from hora.workloads.scenes.config import DataConfig, Profile, SceneConfig
from hora.workloads.scenes.draw import draw
from hora.workloads.scenes.evaluate import evaluate
from hora.workloads.scenes.learner import Detected
from hora.workloads.scenes.sample import Pictures, Sample
from hora.workloads.scenes.truth import average_precision
from hora.workloads.ssd import augment
from hora.workloads.ssd import config as ssd

CONFIG = SceneConfig(train=60, test=40)


@pytest.fixture(scope="module")
def splits() -> tuple[Scenes, Scenes]:
    return compose.load(CONFIG)


def digest(samples: list[Sample]) -> str:
    found = hashlib.sha256()
    for sample in samples:
        assert sample.masks is not None
        for part in (sample.pixels, sample.boxes, sample.labels, sample.masks):
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def test_a_scene_is_a_function_of_seed_split_and_number(splits: tuple[Scenes, Scenes]) -> None:
    train, test = splits
    forward = [train.sample(number) for number in range(5)]
    backward = [train.sample(number) for number in reversed(range(5))][::-1]
    assert digest(forward) == digest(backward)
    others = {digest([test.sample(0)]), digest([train.sample(1)])}
    seeded = Scenes(
        dataclasses.replace(CONFIG, seed=2), "train", train.items, train.labels, train.backgrounds
    )
    others.add(digest([seeded.sample(0)]))
    assert len(others) == 3
    assert digest(forward[:1]) not in others


def test_training_and_test_scenes_share_nothing(splits: tuple[Scenes, Scenes]) -> None:
    train, test = splits
    assert not set(photos.PHOTOS["train"]) & set(photos.PHOTOS["test"])
    items = [{item.tobytes() for item in split.items} for split in splits]
    assert len(items[0]) > 9_900  # nearly all items are different pictures
    assert not items[0] & items[1]
    assert (len(train), len(test)) == (60, 40)


def test_what_is_in_scenes(splits: tuple[Scenes, Scenes]) -> None:
    counts, labels = [], set()
    for split in splits:
        for number in range(len(split)):
            sample = split.sample(number)
            assert sample.pixels.shape == (128, 128, 3)
            assert sample.masks is not None
            # No pixel belongs to two objects, each object shows, and its box is the smallest around it.
            assert sample.masks.sum(axis=0).max() == 1
            assert (sample.masks.sum(axis=(1, 2)) >= 20).all()
            for mask, (left, top, right, bottom) in zip(sample.masks, sample.boxes, strict=True):
                rows, columns = np.nonzero(mask)
                assert (left, right) == (columns.min(), columns.max() + 1)
                assert (top, bottom) == (rows.min(), rows.max() + 1)
            counts.append(len(sample.boxes))
            labels |= set(sample.labels.tolist())
            without = split.sample(number, masks=False)
            assert without.masks is None
            np.testing.assert_array_equal(without.boxes, sample.boxes)
    assert set(counts) == {1, 2, 3, 4}
    assert labels == set(range(10))


def test_objects_hide_each_other_but_never_most_of_one(splits: tuple[Scenes, Scenes]) -> None:
    crowded = dataclasses.replace(CONFIG, most=8)
    train = splits[0]
    scenes = Scenes(crowded, "train", train.items, train.labels, train.backgrounds)
    hidden = 0
    for number in range(30):
        sample = scenes.sample(number)
        assert sample.masks is not None
        boxes = sample.boxes
        for index, mask in enumerate(sample.masks):
            left, top, right, bottom = boxes[index].astype(int)
            others = np.delete(sample.masks, index, axis=0)[:, top:bottom, left:right]
            hidden += bool(others.any())
            assert mask[top:bottom, left:right].any()
    assert hidden > 20


def test_boxes_of_outlines() -> None:
    outline = np.zeros((2, 5, 6), dtype=np.uint8)
    outline[0, 1:3, 2:6] = 1
    outline[1, 4, 0] = 1
    assert boxes_of(outline).tolist() == [[2, 1, 6, 3], [0, 4, 1, 5]]
    assert boxes_of(outline[:0]).shape == (0, 4)


def test_the_truth_has_precision_one_and_nothing_has_zero(splits: tuple[Scenes, Scenes]) -> None:
    test = splits[1]
    wanted = test.truth(range(10))
    found = [
        {**{key: each[key] for key in ("image_id", "category_id", "bbox", "segmentation")}, "score": 0.9}
        for each in wanted["annotations"]
    ]
    assert average_precision(wanted, found, "bbox") == pytest.approx(1.0)
    assert average_precision(wanted, found, "segm") == pytest.approx(1.0)
    assert average_precision(wanted, [], "bbox") == 0.0


def test_average_precision_on_paper() -> None:
    wanted = {
        "images": [{"id": 0, "height": 100, "width": 100}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [
            {"id": 1, "image_id": 0, "category_id": 1, "bbox": [0, 0, 20, 20], "area": 400, "iscrowd": 0},
            {"id": 2, "image_id": 0, "category_id": 1, "bbox": [50, 50, 20, 20], "area": 400, "iscrowd": 0},
        ],
    }
    # One of two objects is found, with an overlap of 20 * 16 / (20 * 20) = 0.8: right at the thresholds
    # 0.50 to 0.80, which are 7 of 10. Recall is 0.5 there, which 51 of the 101 recall points are below.
    found = [{"image_id": 0, "category_id": 1, "bbox": [0, 0, 20, 16.1], "score": 0.5}]
    assert average_precision(wanted, found, "bbox") == pytest.approx(0.7 * 51 / 101)


def test_pictures_of_several_sizes_are_padded_and_others_are_not() -> None:
    def sample(height: int, width: int, *, masks: bool, objects: int = 1) -> Sample:
        return Sample(
            number=height,
            pixels=np.full((height, width, 3), 7, dtype=np.uint8),
            boxes=np.ones((objects, 4), dtype=np.float32),
            labels=np.zeros(objects, dtype=np.int64),
            masks=np.ones((objects, height, width), dtype=np.uint8) if masks else None,
        )

    batch = collate([sample(40, 70, masks=True, objects=2), sample(33, 64, masks=True)], multiple=32)
    assert batch.pixels.shape == (2, 64, 96, 3)
    assert batch.sizes.tolist() == [[40, 70], [33, 64]]
    assert [len(part) for part in batch.per_picture(batch.boxes)] == [2, 1]
    assert [int(mask.sum()) for mask in batch.masks] == [40 * 70, 40 * 70, 33 * 64]
    assert int(batch.pixels[1].sum()) == 33 * 64 * 21
    plain = collate([sample(50, 50, masks=False), sample(50, 50, masks=False)])
    assert plain.pixels.shape == (2, 50, 50, 3)
    assert plain.masks.shape == (2, 0, 0)


def write_coco(root: Path) -> None:
    """Two splits in the form in which COCO 2017 is downloaded, with a crowd and an empty picture."""
    generator = np.random.default_rng(0)
    for split in ("train2017", "val2017"):
        (root / split).mkdir(parents=True)
        images = []
        for number, (height, width) in ((9, (40, 60)), (4, (50, 30)), (25, (20, 20))):
            name = f"{number:012d}.jpg"
            pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels if number != 4 else pixels[..., 0]).save(root / split / name)
            images.append({"id": number, "height": height, "width": width, "file_name": name})
        square = [[10, 5, 30, 5, 30, 25, 10, 25]]
        crowd = {"size": [40, 60], "counts": [0, 400, 2000]}  # the first 10 columns
        annotations: list[dict[str, Any]] = [
            annotation(7, 9, 90, [10, 5, 20, 20], square, crowd=0),
            annotation(8, 9, 3, [0, 0, 10, 40], crowd, crowd=1),
            annotation(3, 4, 3, [1, 2, 8, 9], [[1, 2, 9, 2, 9, 11, 1, 11]], crowd=0),
        ]
        categories = [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}]
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}.json").write_text(
            json.dumps({"images": images, "annotations": annotations, "categories": categories})
        )


def annotation(
    number: int, image: int, category: int, box: list[float], segmentation: object, *, crowd: int
) -> dict[str, Any]:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": box[2] * box[3],
        "segmentation": segmentation,
        "iscrowd": crowd,
    }


def test_a_folder_in_the_form_of_coco(tmp_path: Path) -> None:
    write_coco(tmp_path)
    train, test = data.load(DataConfig(kind="coco", path=tmp_path))
    assert list(train.classes) == ["car", "toothbrush"]
    assert (len(train), len(test)) == (2, 3)  # picture 25 has nothing to learn from
    # In the order of COCO's ids: 4, 9, 25.
    assert [test.size(number) for number in range(3)] == [(50, 30), (40, 60), (20, 20)]
    sample = test.sample(1, masks=True)
    assert sample.boxes.tolist() == [[10, 5, 30, 25]]  # the crowd is nothing to learn from
    assert sample.labels.tolist() == [1]
    assert sample.masks is not None
    assert sample.masks[0, 5:25, 10:30].all()
    assert sample.masks.sum() == 400
    assert test.sample(0, masks=False).pixels.shape == (50, 30, 3)  # grey in the file
    empty = test.sample(2, masks=True)
    assert (empty.boxes.shape, empty.labels.shape) == ((0, 4), (0,))
    wanted = test.truth([0, 1, 2])
    assert [each["iscrowd"] for each in wanted["annotations"]] == [0, 0, 1]
    found = [
        {"image_id": 0, "category_id": 1, "bbox": [1, 2, 8, 9], "score": 0.9},
        {"image_id": 1, "category_id": 2, "bbox": [10, 5, 20, 20], "score": 0.9},
        # Inside of the crowd: neither right nor wrong, although it says so with more confidence.
        {"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 20], "score": 0.95},
    ]
    assert average_precision(wanted, found, "bbox") == pytest.approx(1.0)


class Oracle:
    """Knows the truth of each picture, and tells it as a detector would: in pixels of what it was given."""

    def __init__(self, pictures: Pictures, transform: Callable[[Sample], Sample], profile: Profile) -> None:
        self.model = torch.nn.Identity()
        self.profile = profile
        self._pictures, self._transform = pictures, transform

    def detect(self, batch: Batch) -> list[Detected]:
        found = []
        for number in batch.numbers.tolist():
            sample = self._transform(self._pictures.sample(number, masks=True))
            masks = None
            if sample.masks is not None:
                masks = torch.zeros(len(sample.labels), *batch.pixels.shape[1:3], dtype=torch.bool)
                masks[:, : sample.pixels.shape[0], : sample.pixels.shape[1]] = torch.from_numpy(sample.masks)
            found.append(
                Detected(
                    number=number,
                    boxes=torch.from_numpy(sample.boxes),
                    labels=torch.from_numpy(sample.labels),
                    scores=torch.ones(len(sample.labels)),
                    masks=masks,
                )
            )
        return found


def precision_of_the_truth(root: Path) -> list[dict[str, float]]:
    _, test = data.load(DataConfig(kind="coco", path=root))
    precisions = []
    for profile, transform in (
        (ssd.PROFILES["reference"], augment.evaluation(ssd.PROFILES["reference"])),
        (maskrcnn.PROFILES["reference"], Prepare(maskrcnn.PROFILES["reference"], training=False)),
    ):
        loader = hora.data_loader(
            Prepared(test, transform, masks=False),
            global_batch=2,
            shuffle=False,
            tail="uneven",
            collate_fn=collate,
            num_workers=1,
        )
        oracle: Any = Oracle(test, transform, profile)
        precisions.append(evaluate(oracle, test, loader))
    return precisions


@pytest.mark.parametrize("size", [1, 2])
def test_the_truth_of_coco_goes_through_both_references_and_comes_back(tmp_path: Path, size: int) -> None:
    """SSD's squares of 300 pixels, Mask R-CNN's 800 to 1333 with padding; empty shares; loader processes."""
    write_coco(tmp_path)
    for by_ssd, by_maskrcnn in run_ranks(size, precision_of_the_truth, tmp_path):
        assert by_ssd == {"bbox": pytest.approx(1.0)}
        assert by_maskrcnn == {"bbox": pytest.approx(1.0), "segm": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "annotations" / "instances_val2017.json").unlink(), "cannot be read"),
        (lambda root: (root / "annotations" / "instances_val2017.json").write_text("{"), "is not JSON"),
        (lambda root: (root / "annotations" / "instances_val2017.json").write_text("{}"), "has no images"),
        (lambda root: (root / "val2017" / f"{9:012d}.jpg").unlink(), "cannot be read as an image"),
        (lambda root: (root / "val2017" / f"{9:012d}.jpg").write_bytes(b"no"), "cannot be read as an image"),
        (
            lambda root: Image.new("RGB", (5, 5)).save(root / "val2017" / f"{9:012d}.jpg"),
            "5x5 pixels, but instances_val2017.json says 60x40",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, change: Any, message: str) -> None:
    write_coco(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        CocoPictures(tmp_path, "val2017", only_annotated=False).sample(1, masks=True)


def test_an_annotation_of_an_unknown_picture_is_refused(tmp_path: Path) -> None:
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["image_id"] = 77
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="annotation 7 is of category 90 in picture 77"):
        CocoPictures(tmp_path, "val2017", only_annotated=False)


def test_without_a_path_there_is_no_coco() -> None:
    with pytest.raises(DataError, match="--data PATH"):
        data.load(DataConfig(kind="coco"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    with pytest.raises(MissingExtraError, match="pycocotools"):
        truth.need_pycocotools()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    photos.load.cache_clear()
    with pytest.raises(MissingExtraError, match=r"hora\[workloads\]"):
        photos.load("train")


def test_detections_are_drawn(splits: tuple[Scenes, Scenes]) -> None:
    sample = splits[1].sample(0)
    assert sample.masks is not None
    picture = draw(
        sample.pixels,
        boxes=sample.boxes,
        labels=sample.labels.tolist(),
        classes=splits[1].classes,
        scores=np.linspace(0.9, 0.5, len(sample.boxes)),
        masks=sample.masks,
        scale=3,
    )
    assert picture.shape == (384, 384, 3)
    plain = np.repeat(np.repeat(sample.pixels, 3, axis=0), 3, axis=1)
    changed = (picture != plain).any(axis=2)
    left, top, right, bottom = (3 * sample.boxes[0]).astype(int)
    # The frame of each box is drawn all around; where there is no box, mask or name nothing changes.
    assert changed[top, left:right].all()
    assert changed[top:bottom, left].all()
    assert not changed[-1, -1] or sample.boxes[:, 2:].max() > 126
    assert 0.02 < changed.mean() < 0.9
    # Half transparent: inside of a mask the picture still shows.
    inside = np.repeat(np.repeat(sample.masks[0], 3, axis=0), 3, axis=1).astype(bool)
    assert np.corrcoef(picture[inside].sum(axis=1), plain[inside].sum(axis=1))[0, 1] > 0.2

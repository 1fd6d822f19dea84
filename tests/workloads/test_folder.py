from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.ranks import run_ranks

from hora.core.errors import DataError
from hora.mlperf import MLPerfLog
from hora.workloads.loop import Outcome
from hora.workloads.resnet.config import PROFILES, RESNET50, DataConfig, Profile
from hora.workloads.resnet.data import load
from hora.workloads.resnet.folder import ASPECT, ATTEMPTS, FolderImages, random_box
from hora.workloads.resnet.learner import Learner
from hora.workloads.resnet.train import train

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def tree(root: Path, *, train_count: int = 8, test_count: int = 3) -> Path:
    """Plain images of odd sizes, one colour per class."""
    for split, count in (("train", train_count), ("val", test_count)):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (40 + 7 * index, 61 - 5 * index), colour).save(
                    folder / f"{index}.jpg", quality=95
                )
    return root


def config(root: Path, size: int = 32) -> DataConfig:
    return DataConfig(kind="folder", path=root, image_size=size, decoders=2)


def test_batches_have_the_right_size_colour_and_label(tmp_path: Path) -> None:
    data = load(config(tree(tmp_path)))
    assert (len(data.train), len(data.test)) == (24, 9)
    assert list(data.test.classes) == ["blue", "green", "red"]
    for split, epoch in ((data.train, 0), (data.test, None)):
        images, labels = split.batch(range(len(split)), seed=1, epoch=epoch)
        assert images.shape == (len(split), 32, 32, 3)
        assert images.dtype == np.float32
        assert labels.tolist() == sorted(labels.tolist())
        assert (images.mean(axis=(1, 2)).argmax(axis=1) == np.array([2, 1, 0])[labels]).all()


def test_normalization_by_the_means_and_deviations_of_imagenet(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    Image.new("RGB", (30, 30), (255, 0, 51)).save(tmp_path / "only" / "a.png")
    images, _ = FolderImages(tmp_path, config(tmp_path)).batch([0])
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    np.testing.assert_allclose(images[0, 5, 5], expected, rtol=1e-5)


def test_the_centre_crop(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[4:60, 36:92] = 255  # 56 of 64, the part that 224 of 256 keeps, in the middle
    Image.fromarray(pixels).save(tmp_path / "only" / "a.png")
    picture = FolderImages(tmp_path, config(tmp_path, size=56)).picture(0)
    assert picture.shape == (56, 56, 3)
    assert (picture == 255).all()


def test_augmentation_depends_on_seed_epoch_and_sample_only(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    for index in range(4):
        Image.fromarray(noise).save(tmp_path / "only" / f"{index}.png")
    images = FolderImages(tmp_path, config(tmp_path))
    together, _ = images.batch([0, 1, 2, 3], seed=1, epoch=2)
    for sample in range(4):
        alone, _ = images.batch([sample], seed=1, epoch=2)
        assert np.array_equal(alone[0], together[sample])
    assert not np.array_equal(together[0], together[1])
    assert not np.array_equal(together, images.batch([0, 1, 2, 3], seed=1, epoch=3)[0])
    assert not np.array_equal(together, images.batch([0, 1, 2, 3], seed=2, epoch=2)[0])


def test_random_boxes_keep_their_limits() -> None:
    draws = np.random.default_rng(0).random((500, 4 * ATTEMPTS))
    for row in draws:
        left, top, right, bottom = random_box(500, 375, row)
        width, height = right - left, bottom - top
        assert left >= 0
        assert top >= 0
        assert right <= 500 + 1e-9
        assert bottom <= 375 + 1e-9
        assert 0.05 - 1e-9 <= width * height / (500 * 375) <= 1
        assert ASPECT[0] - 1e-9 <= width / height <= ASPECT[1] + 1e-9


def test_an_image_too_long_for_any_box_gives_its_centre() -> None:
    # 1000 x 10: an area of 5 % or more with an aspect below 4/3 would be at least 19 pixels high.
    assert random_box(1000, 10, np.full(4 * ATTEMPTS, 0.5)) == (495.0, 0.0, 505.0, 10.0)


def no_path(root: Path) -> DataConfig:
    return DataConfig(kind="folder")


def no_folder(root: Path) -> DataConfig:
    return config(root / "nowhere")


def no_images(root: Path) -> DataConfig:
    (root / "train" / "cat").mkdir(parents=True)
    return config(root)


def unknown_class(root: Path) -> DataConfig:
    tree(root)
    (root / "val" / "purple").mkdir()
    return config(root)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_path, "no images of its own"),
        (no_folder, "There is no folder .*train"),
        (no_images, "holds no images"),
        (unknown_class, "purple is a class that the training images do not have"),
    ],
)
def test_bad_trees(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(make(tmp_path))  # type: ignore[operator]


@pytest.mark.parametrize("content", [b"", b"no image at all", "truncated"])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes | str) -> None:
    data = load(config(tree(tmp_path)))
    path = tmp_path / "val" / "blue" / "0.jpg"
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"blue/0\.jpg cannot be read as an image"):
        data.test.batch([0])


def train_on_tree(profile: Profile) -> Outcome:
    return train(Learner(profile), load(profile.data), MLPerfLog(None), started=0.0)


def test_the_reference_profile_trains_on_a_folder_tree(tmp_path: Path) -> None:
    reference = PROFILES["reference"]
    # Small batches and large steps make these few images a matter of luck.
    sgd = dataclasses.replace(reference.optimizer, lr=0.02, warmup_epochs=1.0)
    profile = dataclasses.replace(
        reference,
        data=config(tree(tmp_path)),
        model=dataclasses.replace(RESNET50, stem_width=8, widths=(8, 16, 32, 64), depths=(1, 1, 1, 1)),
        optimizers=(sgd,),
        global_batch=24,
        epochs=30,
        target=0.99,
        calibration_seconds=0.0,
        precision="float32",
    )
    outcomes = run_ranks(2, train_on_tree, profile)
    assert all(outcome.reached for outcome in outcomes), outcomes

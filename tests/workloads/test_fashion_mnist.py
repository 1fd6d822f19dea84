from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tools.make_fashion_mnist_subset import write_subset

from hora.core.errors import DataError
from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet.config import DataConfig
from hora.workloads.resnet.data import FashionImages, load
from hora.workloads.resnet.idx import MAGIC_IMAGES, MAGIC_LABELS

FULL = fashion_mnist.DEBIAN
needs_full = pytest.mark.skipif(not FULL.is_dir(), reason="apt-get install dataset-fashion-mnist")
TRAIN, TEST = fashion_mnist.SPLITS


def idx(magic: int, shape: tuple[int, ...], values: bytes) -> bytes:
    return np.array([magic, *shape], dtype=">u4").tobytes() + values


def write(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content, compresslevel=1))


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A copy of the shipped files, to be damaged."""
    for split in fashion_mnist.SPLITS:
        for name in (split.images, split.labels):
            shutil.copy(fashion_mnist.SHIPPED / name, tmp_path)
    return tmp_path


def test_the_shipped_subset_is_balanced() -> None:
    (train, train_labels), (test, test_labels) = fashion_mnist.load(fashion_mnist.SHIPPED, subset=True)
    assert (train.shape, test.shape) == ((10_000, 28, 28), (2_000, 28, 28))
    assert (train.dtype, train_labels.dtype) == (np.uint8, np.int64)
    assert np.bincount(train_labels).tolist() == [1000] * 10
    assert np.bincount(test_labels).tolist() == [200] * 10


def test_licence_and_origin_are_beside_the_files() -> None:
    assert "Zalando SE" in (fashion_mnist.SHIPPED / "LICENSE").read_text()
    assert "arXiv:1708.07747" in (fashion_mnist.SHIPPED / "ORIGIN.md").read_text()


@needs_full
def test_the_subset_has_the_same_pixels_from_either_source() -> None:
    from_full = fashion_mnist.load(FULL, subset=True)
    from_shipped = fashion_mnist.load(fashion_mnist.SHIPPED, subset=True)
    for ours, theirs in zip(from_full, from_shipped, strict=True):
        assert np.array_equal(ours[0], theirs[0])
        assert np.array_equal(ours[1], theirs[1])


@needs_full
def test_the_tool_makes_the_shipped_files_again(tmp_path: Path) -> None:
    write_subset(FULL, tmp_path)
    for split in fashion_mnist.SPLITS:
        for name in (split.images, split.labels):
            made, kept = (tmp_path / name).read_bytes(), (fashion_mnist.SHIPPED / name).read_bytes()
            # Other versions of zlib compress the same bytes differently.
            assert gzip.decompress(made) == gzip.decompress(kept), name
            assert made[:10] == kept[:10], "the header holds neither a time nor a name"


@needs_full
def test_the_full_profile_has_all_images() -> None:
    data = load(DataConfig(kind="full"))
    assert (len(data.train), len(data.test), data.origin) == (60_000, 10_000, str(FULL))


def test_source_falls_back_to_the_shipped_subset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path)
    assert fashion_mnist.source(None) == fashion_mnist.SHIPPED
    assert fashion_mnist.source(Path("/elsewhere")) == Path("/elsewhere")


def test_the_full_profile_names_the_package_when_images_are_missing() -> None:
    with pytest.raises(DataError, match="10000 of the 60000.*apt-get install dataset-fashion-mnist"):
        fashion_mnist.load(fashion_mnist.SHIPPED, subset=False)


def truncate(directory: Path) -> None:
    path = directory / TEST.images
    path.write_bytes(path.read_bytes()[:100_000])


def cut_before_compressing(directory: Path) -> None:
    path = directory / TEST.images
    write(path, gzip.decompress(path.read_bytes())[:-1])


def flip_a_byte(directory: Path) -> None:
    content = bytearray((directory / TEST.labels).read_bytes())
    content[-6] ^= 0xFF  # inside the checksum
    (directory / TEST.labels).write_bytes(content)


def other_side(directory: Path) -> None:
    write(directory / TEST.images, idx(MAGIC_IMAGES, (2000, 32, 32), bytes(2000 * 32 * 32)))


def fewer_labels(directory: Path) -> None:
    write(directory / TEST.labels, idx(MAGIC_LABELS, (1999,), bytes(1999)))


def label_out_of_range(directory: Path) -> None:
    write(directory / TEST.labels, idx(MAGIC_LABELS, (2000,), bytes(1999) + b"\x0a"))


def too_few_of_a_class(directory: Path) -> None:
    write(directory / TEST.labels, idx(MAGIC_LABELS, (2000,), bytes(2000)))


def a_directory(directory: Path) -> None:
    (directory / TEST.labels).unlink()
    (directory / TEST.labels).mkdir()


def exchanged(directory: Path) -> None:
    shutil.copy(directory / TEST.labels, directory / TEST.images)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / TEST.labels).unlink(), "t10k-labels.* does not exist"),
        (truncate, "t10k-images.* is truncated"),
        (lambda directory: (directory / TEST.images).write_bytes(b""), "ends after 0 bytes"),
        (lambda directory: (directory / TEST.images).write_bytes(b"\x1f\x8b"), "truncated"),
        (lambda directory: write(directory / TEST.images, b"\x00\x00\x08\x03"), "inside its header"),
        (lambda directory: (directory / TEST.images).write_bytes(b"plain"), "not a sound gzip file"),
        (flip_a_byte, "not a sound gzip file"),
        (cut_before_compressing, "holds 1567999 values.* 2000 x 28 x 28 = 1568000"),
        (exchanged, "magic number 0x00000801, but 0x00000803"),
        (other_side, "32x32 pixels, not 28x28"),
        (fewer_labels, "2000 images .* 1999 labels"),
        (label_out_of_range, "has the label 10"),
        (too_few_of_a_class, r"only 0 images of class 1 \(Trouser\)"),
        (a_directory, "t10k-labels.* cannot be read"),
    ],
)
def test_damage_is_one_clear_error(shipped: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(shipped)
    with pytest.raises(DataError, match=message) as caught:
        fashion_mnist.load(shipped, subset=True)
    assert caught.value.fix


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_path_that_is_no_directory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    if kind == "file":
        path.write_text("")
    with pytest.raises(DataError, match="does not exist" if kind == "missing" else "is a file"):
        fashion_mnist.load(path, subset=True)


def test_a_batch_is_normalized_by_the_published_mean_and_deviation() -> None:
    pixels = np.zeros((2, 28, 28), dtype=np.uint8)
    pixels[1] = 255
    images, labels = FashionImages(pixels, np.array([3, 4]), shift=1).batch([1, 0])
    assert images.shape == (2, 28, 28, 1)
    assert images.dtype == np.float32
    assert images[0].max() == pytest.approx((1 - 0.2860) / 0.3530, rel=1e-6)
    assert images[1].min() == pytest.approx(-0.2860 / 0.3530, rel=1e-6)
    assert labels.tolist() == [4, 3]

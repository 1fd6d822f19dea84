"""The images of a training, split into training and test, as batches that need no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError
from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet.augment import flip_and_shift
from hora.workloads.resnet.config import DataConfig

__all__ = ["Batch", "Data", "Images", "load"]

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Normalized images [n, height, width, channels] and labels [n]."""


class Images(Protocol):
    """One split. ``batch`` may be called from any worker in any order: it keeps no state."""

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def batch(self, samples: Sequence[int], *, seed: int = 0, epoch: int | None = None) -> Batch:
        """These samples, augmented for this epoch (from 0), or as they are when ``epoch`` is None."""
        ...

    def picture(self, sample: int) -> NDArray[np.uint8]:
        """The pixels for a person to look at: [height, width] grey or [height, width, 3]."""
        ...


@dataclass(frozen=True)
class Data:
    """Both splits, and where they were found."""

    train: Images
    test: Images
    origin: str


def load(config: DataConfig) -> Data:
    """Find and check the images.

    Raises:
        DataError: they are missing, damaged, too few or of the wrong shape.
    """
    if config.kind == "folder":
        from hora.workloads.resnet.folder import FolderImages

        if config.path is None:
            raise DataError(
                "The reference profile has no images of its own.",
                fix="Give a tree of train/<class>/*.jpg and val/<class>/*.jpg with --data PATH.",
            )
        train = FolderImages(config.path / "train", config)
        return Data(train, FolderImages(config.path / "val", config, classes=train.classes), str(config.path))
    splits = fashion_mnist.load(config.path, subset=config.kind == "subset")
    train_split, test_split = (FashionImages(*split, shift=config.shift) for split in splits)
    return Data(train_split, test_split, str(fashion_mnist.source(config.path)))


class FashionImages:
    """A split of Fashion-MNIST in memory.

    Args:
        pixels: uint8, [n, 28, 28].
        labels: int64, [n].
        shift: random shift of augmented images, in pixels.
    """

    classes: Sequence[str] = fashion_mnist.CLASSES

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], *, shift: int) -> None:
        self.pixels = pixels
        self.labels = labels
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, samples: Sequence[int], *, seed: int = 0, epoch: int | None = None) -> Batch:
        chosen = np.asarray(samples, dtype=np.int64)
        pixels = self.pixels[chosen]
        if epoch is not None:
            pixels = flip_and_shift(pixels, chosen, shift=self.shift, seed=seed, epoch=epoch)
        return _NORMALIZED[pixels][..., None], self.labels[chosen]

    def picture(self, sample: int) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self.pixels[sample]
        return picture


_NORMALIZED = ((np.arange(256) / 255 - fashion_mnist.MEAN) / fashion_mnist.STD).astype(np.float32)
"""Each pixel value, normalized: a look-up is the cheapest conversion."""

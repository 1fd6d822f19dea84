"""Scenes: photos of clothes, shoes and bags put on other photos, with their outlines as ground truth.

Each scene is a pure function of (seed, split, number). Its objects are items of Fashion-MNIST, enlarged,
coloured and partly hidden by those put on it later; where its pixels are not black is its outline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet.augment import uniform
from hora.workloads.scenes import photos, truth
from hora.workloads.scenes.config import SceneConfig
from hora.workloads.scenes.photos import Split
from hora.workloads.scenes.sample import Sample

__all__ = ["Scenes", "load"]

ATTEMPTS = 4
"""Places that are tried for an item before the scene does without it."""
LEAST_VISIBLE = 0.5
"""Of each item's outline; a place where it would hide more of another one is not taken."""
DARKEST = 10
"""Pixels of an item (0 to 255) up to this are its surroundings: traces that cutting out and scaling left."""
ROOM = 3
"""Photos whose short side is more than this many sides of a scene are made smaller once, to save time."""
PER_ITEM = 6 + 2 * ATTEMPTS
"""Random numbers for each item: which, size, mirrored, three colours, then the places."""
SPLIT_SEED: dict[Split, int] = {"train": 0, "test": 1}


@dataclass(frozen=True)
class Scenes:
    """A split of scenes. Fulfils :class:`hora.workloads.scenes.sample.Pictures`.

    Args:
        config: how they are made.
        split: which photos and items they are made from.
        items: uint8, [n, 28, 28].
        labels: int64, [n].
        backgrounds: photos, uint8, [height, width, 3].
    """

    config: SceneConfig
    split: Split
    items: NDArray[np.uint8] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)
    backgrounds: Sequence[NDArray[np.uint8]] = field(repr=False)
    classes: Sequence[str] = fashion_mnist.CLASSES

    def __len__(self) -> int:
        return self.config.train if self.split == "train" else self.config.test

    def size(self, number: int) -> tuple[int, int]:
        return self.config.side, self.config.side

    def sample(self, number: int, *, masks: bool = True) -> Sample:
        config = self.config
        draws = uniform(
            np.array([number]),
            seed=config.seed,
            epoch=SPLIT_SEED[self.split],
            draws=6 + PER_ITEM * config.most,
        )[0]
        pixels = self._background(draws[:5])
        count = 1 + int(draws[5] * config.most)
        # Which object each pixel shows, from 1; 0 is the background.
        shown = np.zeros((config.side, config.side), dtype=np.int64)
        chosen: list[int] = []
        areas: list[int] = []
        for each in draws[6:].reshape(config.most, PER_ITEM)[:count]:
            item = int(each[0] * len(self.items))
            place = self._put(each, item, pixels, shown, areas)
            if place is not None:
                chosen.append(item)
                areas.append(place)
        outlines = (shown[None] == np.arange(1, len(chosen) + 1)[:, None, None]).astype(np.uint8)
        return Sample(
            number=number,
            pixels=pixels,
            boxes=boxes_of(outlines),
            labels=self.labels[chosen],
            masks=outlines if masks else None,
        )

    def truth(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        return truth.of_samples([self.sample(number) for number in numbers], self.classes)

    def _background(self, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        """A square part of a photo, anything from the scene's own side to all of the photo's short side."""
        photo = self.backgrounds[int(draws[0] * len(self.backgrounds))]
        height, width = photo.shape[:2]
        side = self.config.side + int(draws[1] * (min(height, width) - self.config.side + 1))
        top, left = (
            int(draw * (edge - side + 1)) for draw, edge in zip(draws[2:4], (height, width), strict=True)
        )
        part = _resize(photo[top : top + side, left : left + side], self.config.side)
        return part[:, ::-1].copy() if draws[4] < 0.5 else part

    def _put(
        self,
        draws: NDArray[np.float64],
        item: int,
        pixels: NDArray[np.uint8],
        shown: NDArray[np.int64],
        areas: Sequence[int],
    ) -> int | None:
        """Put an item into the scene, in place; the area of its outline, or None if there is no place."""
        config = self.config
        side = round(config.smallest * (config.largest / config.smallest) ** draws[1])
        grey = self.items[item][:, ::-1] if draws[2] < 0.5 else self.items[item]
        looks = _resize(grey, side)
        outline = _resize(np.where(grey > DARKEST, np.uint8(255), np.uint8(0)), side) > 127
        area = int(outline.sum())
        for down, right in draws[6:].reshape(ATTEMPTS, 2):
            top, left = (int(value * (config.side - side + 1)) for value in (down, right))
            below = shown[top : top + side, left : left + side]
            hidden = np.bincount(below[outline], minlength=len(areas) + 1)[1:]
            visible = np.bincount(shown.ravel(), minlength=len(areas) + 1)[1:] - hidden
            if np.all(visible >= LEAST_VISIBLE * np.asarray(areas)):
                below[outline] = len(areas) + 1
                colour = 0.4 + 0.6 * draws[3:6]
                tinted = (looks[outline][:, None] * colour).astype(np.uint8)
                pixels[top : top + side, left : left + side][outline] = tinted
                return area
        return None


def load(config: SceneConfig) -> tuple[Scenes, Scenes]:
    """Training and test scenes; items, photos and scenes of the one are never those of the other.

    Raises:
        MissingExtraError: scikit-image or Pillow is not installed.
        DataError: files of Fashion-MNIST or photos are missing or damaged.
    """
    train, test = fashion_mnist.load(None, subset=config.subset)
    return _scenes(config, "train", *train), _scenes(config, "test", *test)


def _scenes(config: SceneConfig, split: Split, items: NDArray[np.uint8], labels: NDArray[np.int64]) -> Scenes:
    return Scenes(config, split, items, labels, [_fit(photo, config.side) for photo in photos.load(split)])


def boxes_of(outlines: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The smallest boxes around the pixels that are 1. Each outline needs at least one.

    Args:
        outlines: [objects, height, width].

    Returns:
        float32, [objects, 4]: left, top, right, bottom; right and bottom are exclusive.
    """
    columns: NDArray[np.bool_] = np.asarray(outlines.any(axis=1))
    rows: NDArray[np.bool_] = np.asarray(outlines.any(axis=2))
    edges = [columns.argmax(axis=1), rows.argmax(axis=1)]
    edges += [line.shape[1] - line[:, ::-1].argmax(axis=1) for line in (columns, rows)]
    return np.stack(edges, axis=1).astype(np.float32)


def _fit(photo: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The photo with a short side of at least ``side`` and at most ``ROOM`` times that."""
    height, width = photo.shape[:2]
    scale = min(max(min(height, width), side), ROOM * side) / min(height, width)
    return photo if scale == 1 else _resize(photo, round(width * scale), round(height * scale))


def _resize(pixels: NDArray[np.uint8], width: int, height: int | None = None) -> NDArray[np.uint8]:
    from PIL import Image

    size = (width, width if height is None else height)
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))

"""SSD's augmentation: crops that keep some overlap with objects, mirroring, colours.

All draws come from NumPy's global generator, which the loader seeds for each sample.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hora.workloads.scenes.boxes import overlap
from hora.workloads.scenes.sample import Sample
from hora.workloads.ssd.config import SSDProfile

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["crop", "evaluation", "jitter", "mirror", "resize", "training"]

LEAST_OVERLAPS = (None, 0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the crop with each object; None: any. As in the paper (arXiv:1512.02325, section 2.2) and reference."""
LEAST_SIDE, LEAST_ASPECT, LARGEST_ASPECT = 0.3, 0.5, 2.0
ATTEMPTS = 50
"""Options that are tried before the picture stays whole; the reference goes on until one succeeds."""


class training:  # noqa: N801  (used like a function; a class so that loader processes can be sent it)
    """What is done to a training sample."""

    def __init__(self, profile: SSDProfile) -> None:
        self._profile = profile

    def __call__(self, sample: Sample) -> Sample:
        profile = self._profile
        if np.random.random() < profile.crop:
            sample = crop(sample)
        sample = resize(sample, profile.model.side)
        if np.random.random() < 0.5:
            sample = mirror(sample)
        return jitter(sample, profile.jitter)


class evaluation:  # noqa: N801
    """What is done to a test sample."""

    def __init__(self, profile: SSDProfile) -> None:
        self._side = profile.model.side

    def __call__(self, sample: Sample) -> Sample:
        return resize(sample, self._side)


def crop(sample: Sample) -> Sample:
    """A random part whose overlap with each object is at least one of the paper's values.

    Objects whose centre lies outside are dropped, the others cut. At least one stays.
    """
    height, width = sample.pixels.shape[:2]
    if not len(sample.boxes):
        return sample
    boxes = torch.from_numpy(sample.boxes)
    centres = (sample.boxes[:, :2] + sample.boxes[:, 2:]) / 2
    for _ in range(ATTEMPTS):
        draws = np.random.random(5)
        least = LEAST_OVERLAPS[int(draws[0] * len(LEAST_OVERLAPS))]
        wide, high = LEAST_SIDE + draws[1:3] * (1 - LEAST_SIDE)
        if not LEAST_ASPECT <= wide / high <= LARGEST_ASPECT:
            continue
        left, top = int(draws[3] * (1 - wide) * width), int(draws[4] * (1 - high) * height)
        right, bottom = left + max(1, int(wide * width)), top + max(1, int(high * height))
        part = torch.tensor([[left, top, right, bottom]], dtype=torch.float32)
        if least is not None and not bool((overlap(part, boxes) > least).all()):
            continue
        inside = ((centres > (left, top)) & (centres < (right, bottom))).all(axis=1)
        if not inside.any():
            continue
        kept = np.clip(sample.boxes[inside], (left, top) * 2, (right, bottom) * 2)
        return dataclasses.replace(
            sample,
            pixels=sample.pixels[top:bottom, left:right],
            boxes=(kept - np.array((left, top) * 2)).astype(np.float32),
            labels=sample.labels[inside],
            masks=None if sample.masks is None else sample.masks[inside, top:bottom, left:right],
        )
    return sample


def resize(sample: Sample, side: int) -> Sample:
    """The picture as a square, its proportions not kept."""
    from PIL import Image

    height, width = sample.pixels.shape[:2]
    if height == width == side:
        return sample
    pixels = np.ascontiguousarray(sample.pixels)
    resized = np.array(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))
    scale = np.array((side / width, side / height) * 2, dtype=np.float32)
    return dataclasses.replace(sample, pixels=resized, boxes=sample.boxes * scale, masks=None)


def mirror(sample: Sample) -> Sample:
    """Left to right."""
    width = sample.pixels.shape[1]
    left, top, right, bottom = sample.boxes.T
    return dataclasses.replace(
        sample,
        pixels=sample.pixels[:, ::-1],
        boxes=np.stack((width - right, top, width - left, bottom), axis=1),
        masks=None if sample.masks is None else sample.masks[:, :, ::-1],
    )


def jitter(sample: Sample, strength: tuple[float, float, float, float]) -> Sample:
    """Random brightness, contrast, saturation and hue, in this order.

    Args:
        sample: of which only the pixels change.
        strength: how far each goes; the first three are factors from 1 - s to 1 + s, hue is shifted by at
            most s of the circle.
    """
    if not any(strength):
        return sample
    from PIL import Image, ImageEnhance

    draws = np.random.random(4) * 2 - 1
    image = Image.fromarray(np.ascontiguousarray(sample.pixels))
    for enhance, draw, most in zip(
        (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), draws, strength, strict=False
    ):
        if most:
            image = enhance(image).enhance(1 + draw * most)
    if strength[3]:
        image = _turn_hue(image, draws[3] * strength[3])
    return dataclasses.replace(sample, pixels=np.array(image))


def _turn_hue(image: Image.Image, part: float) -> Image.Image:
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    turned = (np.array(hue).astype(np.int64) + math.floor(part * 256)) % 256
    changed = Image.fromarray(cast("NDArray[np.uint8]", turned.astype(np.uint8)))
    return Image.merge("HSV", (changed, saturation, value)).convert("RGB")

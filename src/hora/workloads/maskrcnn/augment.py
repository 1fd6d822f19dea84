"""What is done to pictures before Mask R-CNN sees them: scaled and, in training, mirrored."""

from __future__ import annotations

import dataclasses

import numpy as np

from hora.workloads.maskrcnn.config import MaskRCNNProfile
from hora.workloads.scenes.sample import Sample
from hora.workloads.ssd.augment import mirror

__all__ = ["Prepare", "scale"]


class Prepare:
    """What is done to a sample.

    Args:
        profile: says to which size.
        training: mirror half of the samples, drawn from NumPy's global generator, which the loader seeds.
    """

    def __init__(self, profile: MaskRCNNProfile, *, training: bool) -> None:
        self._profile = profile
        self._training = training

    def __call__(self, sample: Sample) -> Sample:
        if self._profile.short_side:
            sample = scale(sample, short=self._profile.short_side, long=self._profile.long_side)
        if self._training and np.random.random() < 0.5:
            sample = mirror(sample)
        return sample


def scale(sample: Sample, *, short: int, long: int) -> Sample:
    """The picture with its short side scaled to ``short``, or the long one to ``long`` if that is less."""
    from PIL import Image

    height, width = sample.pixels.shape[:2]
    factor = min(short / min(height, width), long / max(height, width))
    new = max(1, round(width * factor)), max(1, round(height * factor))
    if new == (width, height):
        return sample
    pixels = np.array(Image.fromarray(sample.pixels).resize(new, Image.Resampling.BILINEAR))
    masks = sample.masks
    if masks is not None:
        resized = [np.array(Image.fromarray(mask).resize(new, Image.Resampling.NEAREST)) for mask in masks]
        masks = np.stack(resized) if resized else np.zeros((0, new[1], new[0]), dtype=np.uint8)
    factors = np.array((new[0] / width, new[1] / height) * 2, dtype=np.float32)
    return dataclasses.replace(sample, pixels=pixels, boxes=sample.boxes * factors, masks=masks)

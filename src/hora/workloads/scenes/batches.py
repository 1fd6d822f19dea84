"""Pictures as batches: decoded, augmented and put together in the loader's processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hora.workloads.scenes.sample import Pictures, Sample

__all__ = ["Batch", "Prepared", "collate", "normalize"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Per channel over ImageNet's training images, for pixels scaled to 0..1."""


class Batch(NamedTuple):
    """Pictures of a batch, and all their objects one after the other.

    Attributes:
        numbers: int64, [pictures], their places in the data set.
        pixels: uint8, [pictures, height, width, 3]; smaller ones have zeros at the right and below.
        sizes: int64, [pictures, 2], height and width without that.
        counts: int64, [pictures], objects of each.
        boxes: float32, [objects, 4], in pixels.
        labels: int64, [objects], from 0.
        masks: uint8, [objects, height, width]; [objects, 0, 0] where no masks are needed.
    """

    numbers: Tensor
    pixels: Tensor
    sizes: Tensor
    counts: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor

    def per_picture(self, objects: Tensor) -> Sequence[Tensor]:
        """Boxes, labels or masks of each picture."""
        counts: list[int] = self.counts.tolist()
        return torch.split(objects, counts)


class Prepared(Dataset[Sample]):
    """Pictures as the network gets them.

    ``data_loader`` seeds all random generators for each sample by (seed, epoch, position) before it asks for
    it, so that a transform may draw from any of them, in whichever process it runs.

    Args:
        pictures: the split.
        transform: what is done to each sample.
        masks: whether masks are needed.
    """

    def __init__(self, pictures: Pictures, transform: Callable[[Sample], Sample], *, masks: bool) -> None:
        self._pictures = pictures
        self._transform = transform
        self._masks = masks

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, number: int) -> Sample:
        return self._transform(self._pictures.sample(number, masks=self._masks))


def collate(samples: Sequence[Sample], *, multiple: int = 1) -> Batch:
    """A batch of samples, padded to one size where they have several.

    Args:
        samples: at least one.
        multiple: of which height and width of the batch are, in pixels.
    """
    sizes = np.array([sample.pixels.shape[:2] for sample in samples], dtype=np.int64)
    height, width = (-(-edge // multiple) * multiple for edge in sizes.max(axis=0).tolist())
    pixels = np.zeros((len(samples), height, width, 3), dtype=np.uint8)
    counts = np.array([len(sample.labels) for sample in samples], dtype=np.int64)
    masked = samples[0].masks is not None
    masks = np.zeros((counts.sum(), height if masked else 0, width if masked else 0), dtype=np.uint8)
    start = 0
    for index, sample in enumerate(samples):
        rows, columns = sample.pixels.shape[:2]
        pixels[index, :rows, :columns] = sample.pixels
        if sample.masks is not None:
            masks[start : start + len(sample.masks), :rows, :columns] = sample.masks
        start += len(sample.labels)
    return Batch(
        numbers=torch.tensor([sample.number for sample in samples]),
        pixels=torch.from_numpy(pixels),
        sizes=torch.from_numpy(sizes),
        counts=torch.from_numpy(counts),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        labels=torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        masks=torch.from_numpy(masks),
    )


def normalize(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, height, width, 3] to [n, 3, height, width] of mean 0 and deviation 1, channels last."""
    mean, std = (torch.tensor(values, dtype=dtype, device=pixels.device) for values in (MEAN, STD))
    return ((pixels.to(dtype) / 255 - mean) / std).permute(0, 3, 1, 2)

"""RoIAlign: features of regions, without rounding; and masks of regions, put back into the picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hora.workloads.scenes.compiled import torchvision_ops

__all__ = ["align", "crop_masks", "levels", "paste"]


def align(
    features: Tensor,
    boxes: Sequence[Tensor],
    *,
    size: int,
    scale: float,
    sampling: int = 2,
    centred: bool = False,
) -> Tensor:
    """RoIAlign (K. He et al., "Mask R-CNN", arXiv:1703.06870, section 3).

    Each region is cut into size x size cells, and each cell takes the mean of sampling x sampling points,
    interpolated bilinearly. Points more than a pixel outside of the features count as 0. Uses torchvision's
    ``roi_align`` where it is installed.

    Args:
        features: [pictures, channels, height, width].
        boxes: for each picture, [regions, 4] in pixels of the picture.
        size: cells along each side.
        scale: of the features against the picture, such as 1/16.
        sampling: points along each side of a cell.
        centred: pixel centres lie at halves (torchvision's ``aligned=True``), where the boxes' edges see
            them. False is the MLPerf reference: centres at whole numbers, and regions at least a pixel wide.

    Returns:
        [regions of all pictures, channels, size, size].
    """
    compiled = torchvision_ops()
    if compiled is not None:
        pooled: Tensor = compiled.roi_align(features, list(boxes), size, scale, sampling, centred)
        return pooled
    parts = [
        _align(picture, regions * scale, size=size, sampling=sampling, centred=centred)
        for picture, regions in zip(features.unbind(), boxes, strict=True)
        if len(regions)
    ]
    return torch.cat(parts) if parts else features.new_zeros(0, features.shape[1], size, size)


def levels(boxes: Tensor, *, first: int, last: int, canonical: int = 224, at: int = 4) -> Tensor:
    """The level of a feature pyramid that each region is taken from, int64, [n].

    T.-Y. Lin et al., "Feature Pyramid Networks", arXiv:1612.03144, equation 1: a region of ``canonical``
    pixels square comes from level ``at``, one half as large from the level below. Level k has stride 2^k.

    Args:
        boxes: [n, 4].
        first: the finest level there is.
        last: the coarsest.
        canonical: side in pixels.
        at: level of that side.
    """
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp(min=0).sqrt()
    level = torch.floor(at + torch.log2(side / canonical + 1e-6))
    return level.clamp(first, last).long()


def crop_masks(masks: Tensor, which: Tensor, boxes: Tensor, *, size: int) -> Tensor:
    """What a mask head has to predict: the part of a mask in each box, size x size, 0 or 1.

    Each cell has the value of the pixel that its centre lies in; outside of the picture there is nothing.

    Args:
        masks: [m, height, width], 0 or 1.
        which: int64, [n], the mask of each box.
        boxes: [n, 4] in pixels.
        size: of the result along each side.

    Returns:
        [n, size, size], of the type of the masks.
    """
    height, width = masks.shape[-2:]
    y, x = (points.round().long() for points in _points(boxes, points=size, centred=True))
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    return masks[which[:, None, None], y[:, :, None], x[:, None, :]] * inside


def paste(masks: Tensor, boxes: Tensor, *, height: int, width: int) -> Tensor:
    """Masks of regions as masks of the whole picture: [n, height, width], the probabilities interpolated.

    The cells of a mask lie evenly over its box; outside of the box all is 0.

    Args:
        masks: [n, size, size], probabilities.
        boxes: [n, 4] in pixels.
        height: of the picture in pixels.
        width: of the picture.
    """
    size = masks.shape[-1]
    left, top, right, bottom = boxes.float().unbind(1)
    rows = torch.arange(height, device=masks.device) + 0.5
    columns = torch.arange(width, device=masks.device) + 0.5
    y = (rows - top[:, None]) / (bottom - top).clamp(min=1)[:, None]
    x = (columns - left[:, None]) / (right - left).clamp(min=1)[:, None]
    inside = ((y > 0) & (y < 1))[:, :, None] & ((x > 0) & (x < 1))[:, None, :]
    whole = _sample(masks[:, None], y * size - 0.5, x * size - 0.5)[:, 0]
    return whole * inside


def _align(features: Tensor, boxes: Tensor, *, size: int, sampling: int, centred: bool) -> Tensor:
    """Of one picture [channels, height, width]; boxes [n, 4] in pixels of the features."""
    channels, height, width = features.shape
    points = size * sampling
    y, x = _points(boxes, points=points, centred=centred)
    # One grid for all regions of the picture, below each other, so that its features are read once.
    grid_y = y[:, :, None].expand(-1, -1, points).reshape(1, -1, points)
    grid_x = x[:, None, :].expand(-1, points, -1).reshape(1, -1, points)
    near = (grid_y >= -1) & (grid_y <= height) & (grid_x >= -1) & (grid_x <= width)
    values = F.grid_sample(
        features[None],
        torch.stack((_unit(grid_x, width), _unit(grid_y, height)), dim=-1).to(features.dtype),
        padding_mode="border",
        align_corners=False,
    )
    if not bool(near.all()):
        values = values * near[:, None]
    if sampling > 1:
        values = F.avg_pool2d(values, sampling)
    return values.view(channels, len(boxes), size, size).transpose(0, 1)


def _points(boxes: Tensor, *, points: int, centred: bool) -> tuple[Tensor, Tensor]:
    """Where regions are looked at: y [n, points] and x likewise, where pixel centres are whole numbers."""
    steps = (torch.arange(points, device=boxes.device, dtype=boxes.dtype) + 0.5) / points
    left, top, right, bottom = boxes.unbind(1)
    width, height = right - left, bottom - top
    if not centred:
        width, height = width.clamp(min=1), height.clamp(min=1)
    shift = 0.5 if centred else 0.0
    return top[:, None] - shift + height[:, None] * steps, left[:, None] - shift + width[:, None] * steps


def _sample(pictures: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Each picture [n, channels, height, width] at its rows y [n, h] and columns x [n, w]."""
    height, width = pictures.shape[-2:]
    grid_y = _unit(y, height)[:, :, None].expand(-1, -1, x.shape[1])
    grid_x = _unit(x, width)[:, None, :].expand(-1, y.shape[1], -1)
    grid = torch.stack((grid_x, grid_y), dim=-1).to(pictures.dtype)
    return F.grid_sample(pictures, grid, padding_mode="border", align_corners=False)


def _unit(pixel: Tensor, length: int) -> Tensor:
    """Pixels, whose centres are whole numbers, as grid_sample's -1 to 1 from edge to edge."""
    return (2 * pixel + 1) / length - 1

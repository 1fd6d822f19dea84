"""Detections drawn on pictures, for people to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hora.workloads.resnet.folder import need_pillow

__all__ = ["draw", "png", "side_by_side"]

COLOURS = (
    *((230, 97, 1), (94, 60, 153), (27, 158, 119), (231, 41, 138), (0, 114, 178)),
    *((190, 160, 10), (166, 86, 40), (102, 166, 30), (117, 112, 179), (213, 62, 79)),
)
"""One for each class, told apart also by those who see few colours."""
OPACITY = 0.45
"""Of masks."""
PALETTE = 192
"""Colours of a PNG file: with a palette it takes a third of the space."""
GAP = 6
"""Pixels between pictures side by side."""


def draw(
    pixels: NDArray[np.uint8],
    *,
    boxes: NDArray[np.float32],
    labels: Sequence[int],
    classes: Sequence[str],
    scores: NDArray[np.float64] | None = None,
    masks: NDArray[np.uint8] | None = None,
    scale: int = 1,
) -> NDArray[np.uint8]:
    """The picture with a frame and a name for each box, masks half transparent.

    Args:
        pixels: [height, width, 3].
        boxes: [n, 4] in pixels. Those first are drawn last.
        labels: of each box, from 0; each has its colour.
        classes: names of the labels.
        scores: 0 to 1, shown behind the names; None for ground truth.
        masks: [n, height, width], 0 or 1.
        scale: pixels of the result for each pixel.

    Returns:
        uint8, [scale * height, scale * width, 3].

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    need_pillow()
    from PIL import Image, ImageDraw

    colours = [COLOURS[label % len(COLOURS)] for label in labels]
    painted = pixels.astype(np.float32)
    if masks is not None:
        for colour, mask in reversed(list(zip(colours, masks, strict=True))):
            inside = mask.astype(bool)
            painted[inside] = (1 - OPACITY) * painted[inside] + OPACITY * np.array(colour)
    height, width = pixels.shape[:2]
    image = Image.fromarray(painted.astype(np.uint8))
    image = image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    for index in reversed(range(len(labels))):
        left, top, right, bottom = (round(float(edge) * scale) for edge in boxes[index])
        colour, said = colours[index], classes[labels[index]]
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour)
        said = said if scores is None else f"{said} {scores[index]:.2f}"
        edges = pen.textbbox((left + 1, top), said)
        pen.rectangle(edges, fill=colour)
        pen.text((left + 1, top), said, fill="white")
    return np.array(image)


def side_by_side(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Pictures of one height in a row, white between them."""
    height = pictures[0].shape[0]
    gap = np.full((height, GAP, 3), 255, dtype=np.uint8)
    parts: list[NDArray[np.uint8]] = []
    for picture in pictures:
        parts += [picture, gap]
    return np.concatenate(parts[:-1], axis=1)


def png(pixels: NDArray[np.uint8]) -> str:
    """The picture as a PNG file in base64, as ``predictions.json`` holds it."""
    need_pillow()
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).quantize(PALETTE).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()

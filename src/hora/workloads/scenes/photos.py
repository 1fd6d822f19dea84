"""Real photos for the backgrounds of scenes: those that the package scikit-image ships in its wheel.

They are read as files; scikit-image itself, which takes a while to import, is not. The photos of training
scenes are never those of test scenes, and of the two views of one motorcycle only one is used.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError, MissingExtraError
from hora.workloads.resnet.folder import need_pillow

__all__ = ["PHOTOS", "Split", "load"]

Split = Literal["train", "test"]

PHOTOS: dict[Split, tuple[str, ...]] = {
    "train": (
        "astronaut.png",
        "brick.png",
        "coffee.png",
        "gravel.png",
        "hubble_deep_field.jpg",
        "ihc.png",
        "moon.png",
        "motorcycle_left.png",
        "retina.jpg",
        "rocket.jpg",
    ),
    "test": ("camera.png", "cell.png", "chelsea.png", "clock_motion.png", "coins.png", "grass.png"),
}
"""File names in scikit-image's folder ``data``. Drawings, diagrams and pages of text are left out."""


@functools.cache
def load(split: Split) -> tuple[NDArray[np.uint8], ...]:
    """The split's photos, each [height, width, 3]; grey ones have three equal channels.

    Raises:
        MissingExtraError: scikit-image or Pillow is not installed.
        DataError: a photo is missing or damaged.
    """
    need_pillow()
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        raise MissingExtraError(
            "The scenes' backgrounds are photos that scikit-image ships.",
            fix="Run `pip install 'hora[workloads]'`.",
        )
    return tuple(_read(Path(found.origin).parent / "data" / name) for name in PHOTOS[split])


def _read(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels: NDArray[np.uint8] = np.array(image.convert("RGB"))
            return pixels
    except (OSError, ValueError, SyntaxError) as error:  # Pillow reports damaged files by all three
        raise DataError(
            f"{path} cannot be read as a photo: {error}.",
            fix="Install scikit-image again: pip install --force-reinstall --no-deps scikit-image.",
        ) from error

"""Images in a tree of one folder per class, as ImageNet is usually laid out.

Training: random-resized crop and mirroring. Test: the short side to 256/224 of the crop, then the centre
crop. Both as in the MLPerf reference for ResNet-50 v1.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError, MissingExtraError
from hora.workloads.resnet.augment import uniform
from hora.workloads.resnet.config import DataConfig

if TYPE_CHECKING:
    from PIL import Image

    from hora.workloads.resnet.data import Batch

__all__ = ["FolderImages"]

SUFFIXES = {".jpg", ".jpeg", ".png"}
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)
"""Per channel over ImageNet's training images, for pixels scaled to 0..1."""
AREA = (0.05, 1.0)
ASPECT = (3 / 4, 4 / 3)
ATTEMPTS = 10
"""Random-resized crop of the reference: area, aspect ratio, tries before the centre is taken."""
SHORT_SIDE = 256 / 224


class FolderImages:
    """One split of a folder tree.

    Args:
        root: the folder that holds one folder per class.
        config: image size and decoder threads.
        classes: the class names to expect; None: those found, in alphabetical order.

    Raises:
        DataError: no such folder, no images, an unknown class, or (from ``batch``) an unreadable image.
        MissingExtraError: Pillow is not installed.
    """

    def __init__(self, root: Path, config: DataConfig, *, classes: Sequence[str] | None = None) -> None:
        need_pillow()
        if not root.is_dir():
            raise DataError(
                f"There is no folder {root}.",
                fix="Give a tree of train/<class>/*.jpg and val/<class>/*.jpg with --data PATH.",
            )
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        self.classes: Sequence[str] = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(
                f"{root / unknown[0]} is a class that the training images do not have.",
                fix="Give train/ and val/ the same folders.",
            )
        number = {name: index for index, name in enumerate(self.classes)}
        self.paths: list[Path] = []
        labels: list[int] = []
        for name in found:
            files = sorted(file for file in (root / name).iterdir() if file.suffix.lower() in SUFFIXES)
            self.paths += files
            labels += [number[name]] * len(files)
        if not self.paths:
            raise DataError(
                f"{root} holds no images.", fix=f"Put .jpg, .jpeg or .png files into {root}/<class>/."
            )
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)
        self._size = config.image_size
        self._decoders = config.decoders

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, samples: Sequence[int], *, seed: int = 0, epoch: int | None = None) -> Batch:
        chosen = np.asarray(samples, dtype=np.int64)
        # Pillow decodes without the interpreter's lock. Starting threads is cheap against decoding.
        with ThreadPoolExecutor(max_workers=self._decoders) as decoders:
            if epoch is None:
                pixels = list(decoders.map(self._centre, chosen))
            else:
                draws = uniform(chosen, seed=seed, epoch=epoch, draws=4 * ATTEMPTS + 1)
                pixels = list(decoders.map(self._random, chosen, draws))
        images: NDArray[np.float32] = (np.stack(pixels).astype(np.float32) / np.float32(255) - MEAN) / STD
        return images, self.labels[chosen]

    def picture(self, sample: int) -> NDArray[np.uint8]:
        return self._centre(sample)

    def _random(self, sample: int, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        image = self._open(sample)
        box = random_box(image.width, image.height, draws[1:])
        pixels = self._resize(image, box, self._size, self._size)
        return pixels[:, ::-1] if draws[0] < 0.5 else pixels

    def _centre(self, sample: int) -> NDArray[np.uint8]:
        image = self._open(sample)
        side = min(image.width, image.height) / SHORT_SIDE
        left, top = (image.width - side) / 2, (image.height - side) / 2
        # One resampling of the centre gives the same pixels as resizing all of it and cropping then.
        return self._resize(image, (left, top, left + side, top + side), self._size, self._size)

    def _open(self, sample: int) -> Image.Image:
        from PIL import Image

        path = self.paths[sample]
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # Pillow reports damaged files by all three
            raise DataError(
                f"{path} cannot be read as an image: {error}.", fix="Fetch it again, or remove it."
            ) from error

    @staticmethod
    def _resize(
        image: Image.Image, box: tuple[float, float, float, float], width: int, height: int
    ) -> NDArray[np.uint8]:
        from PIL import Image

        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=box))


def random_box(width: int, height: int, draws: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom) of a random-resized crop.

    Args:
        width: of the image, in pixels.
        height: of the image, in pixels.
        draws: 4 uniform numbers for each attempt: area, aspect ratio (logarithmic), left, top.
    """
    for area, aspect, left, top in draws.reshape(-1, 4):
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        ratio = math.exp(math.log(ASPECT[0]) + aspect * math.log(ASPECT[1] / ASPECT[0]))
        box_width, box_height = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
        if box_width <= width and box_height <= height:
            x, y = left * (width - box_width), top * (height - box_height)
            return x, y, x + box_width, y + box_height
    side = min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return x, y, x + side, y + side


def need_pillow() -> None:
    """Raise MissingExtraError when Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "Reading image files needs Pillow.", fix="Run `pip install 'hora[workloads]'`."
        ) from None

"""One picture with its objects: what every data set for detection gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pictures", "Sample"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture and the objects in it.

    Attributes:
        number: of the picture in its data set, from 0.
        pixels: uint8, [height, width, 3].
        boxes: float32, [objects, 4], left, top, right, bottom in pixels; the right and bottom edges are
            exclusive, so that width is right minus left.
        labels: int64, [objects], from 0.
        masks: uint8, [objects, height, width], 1 where the object is visible; None where not asked for.
    """

    number: int
    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    masks: NDArray[np.uint8] | None = None


class Pictures(Protocol):
    """One split. ``sample`` may be called from any worker in any order: it keeps no state."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the labels."""
        ...

    def __len__(self) -> int: ...

    def sample(self, number: int, *, masks: bool) -> Sample:
        """The picture, not augmented, with what is known of it."""
        ...

    def size(self, number: int) -> tuple[int, int]:
        """Height and width of the picture in pixels, without decoding it."""
        ...

    def truth(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        """COCO's ``images``, ``annotations`` and ``categories`` of these pictures.

        Image ids are the numbers, category ids the labels plus 1.
        """
        ...

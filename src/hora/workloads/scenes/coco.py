"""COCO 2017 as it is downloaded: ``annotations/instances_*.json`` and folders of JPEG files.

T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", arXiv:1405.0312. Training pictures without
objects are left out, as in the MLPerf references (117,266 of 118,287 are left).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError
from hora.workloads.resnet.folder import need_pillow
from hora.workloads.scenes.sample import Sample
from hora.workloads.scenes.truth import need_pycocotools

__all__ = ["CocoPictures"]


class CocoPictures:
    """A split of COCO. Fulfils :class:`hora.workloads.scenes.sample.Pictures`.

    Args:
        root: the folder that holds ``annotations`` and the pictures' folders.
        split: ``train2017`` or ``val2017``.
        only_annotated: leave out pictures that no object is known of, crowds not counted.

    Raises:
        DataError: a file is missing or is not what it should be; from ``sample``: a picture is.
        MissingExtraError: Pillow or pycocotools is not installed.
    """

    def __init__(self, root: Path, split: str, *, only_annotated: bool) -> None:
        need_pillow()
        need_pycocotools()
        self._folder = root / split
        self._file = root / "annotations" / f"instances_{split}.json"
        content = _read(self._file)
        categories = sorted(content["categories"], key=lambda category: int(category["id"]))
        self.classes: Sequence[str] = [str(category["name"]) for category in categories]
        # COCO numbers its 80 categories from 1 to 90, with holes.
        self._label = {category["id"]: index for index, category in enumerate(categories)}
        found: dict[int, list[dict[str, Any]]] = {int(image["id"]): [] for image in content["images"]}
        for annotation in content["annotations"]:
            self._check(annotation, found)
            found[int(annotation["image_id"])].append(annotation)
        images = sorted(content["images"], key=lambda image: int(image["id"]))
        self._images = [
            image
            for image in images
            if not only_annotated or any(_counts(each) for each in found[int(image["id"])])
        ]
        self._annotations = [found[int(image["id"])] for image in self._images]
        if not self._images:
            raise DataError(
                f"{self._file} knows of no picture with an object.",
                fix="Give the folder of COCO 2017 with --data PATH.",
            )

    def __len__(self) -> int:
        return len(self._images)

    def size(self, number: int) -> tuple[int, int]:
        image = self._images[number]
        return int(image["height"]), int(image["width"])

    def sample(self, number: int, *, masks: bool) -> Sample:
        height, width = self.size(number)
        pixels = self._pixels(number)
        objects = [each for each in self._annotations[number] if _counts(each)]
        boxes = np.array([each["bbox"] for each in objects], dtype=np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]  # COCO gives width and height
        boxes = np.clip(boxes, 0, np.array((width, height) * 2, dtype=np.float32))
        labels = np.array([self._label[each["category_id"]] for each in objects], dtype=np.int64)
        outlines: NDArray[np.uint8] | None = None
        if masks:
            outlines = np.zeros((len(objects), height, width), dtype=np.uint8)
            for index, each in enumerate(objects):
                outlines[index] = _mask(each["segmentation"], height, width)
        return Sample(number=number, pixels=pixels, boxes=boxes, labels=labels, masks=outlines)

    def truth(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        annotations = [
            each
            | {
                "id": 0,
                "image_id": number,
                "category_id": self._label[each["category_id"]] + 1,
                "segmentation": _encoded(each["segmentation"], *self.size(number)),
            }
            for number in numbers
            for each in self._annotations[number]
        ]
        for index, annotation in enumerate(annotations):
            annotation["id"] = index + 1
        return {
            "images": [
                {"id": number, "height": height, "width": width}
                for number in numbers
                for height, width in (self.size(number),)
            ],
            "annotations": annotations,
            "categories": [{"id": index + 1, "name": name} for index, name in enumerate(self.classes)],
        }

    def _pixels(self, number: int) -> NDArray[np.uint8]:
        from PIL import Image

        path = self._folder / str(self._images[number]["file_name"])
        try:
            with Image.open(path) as image:
                pixels: NDArray[np.uint8] = np.array(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow reports damaged files by all three
            raise DataError(f"{path} cannot be read as an image: {error}.", fix="Fetch it again.") from error
        if pixels.shape[:2] != self.size(number):
            raise DataError(
                f"{path} has {pixels.shape[1]}x{pixels.shape[0]} pixels, but {self._file.name} says "
                f"{self.size(number)[1]}x{self.size(number)[0]}.",
                fix="Take pictures and annotations from the same release of COCO.",
            )
        return pixels

    def _check(self, annotation: Mapping[str, Any], images: Mapping[int, object]) -> None:
        missing = {"image_id", "category_id", "bbox", "segmentation"} - set(annotation)
        if missing:
            raise DataError(
                f"{self._file}: annotation {annotation.get('id')} has no {', '.join(sorted(missing))}.",
                fix="Give the files of COCO 2017 (instances_*.json) with --data PATH.",
            )
        if annotation["category_id"] not in self._label or int(annotation["image_id"]) not in images:
            raise DataError(
                f"{self._file}: annotation {annotation.get('id')} is of category {annotation['category_id']} "
                f"in picture {annotation['image_id']}, which the file does not list.",
                fix="Fetch the file again.",
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}.",
            fix="Give the folder with annotations/, train2017/ and val2017/ with --data PATH.",
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.", fix="Fetch the file again.") from error
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= set(content):
        raise DataError(
            f"{path} has no images, annotations and categories.",
            fix="Give the files of COCO 2017 (instances_*.json) with --data PATH.",
        )
    return content


def _counts(annotation: Mapping[str, Any]) -> bool:
    """Whether it is an object to learn from: no crowd, and not empty."""
    _, _, width, height = annotation["bbox"]
    return not annotation.get("iscrowd", 0) and width > 0 and height > 0


def _encoded(segmentation: Any, height: int, width: int) -> Any:
    """Run lengths of a polygon, or of what are run lengths already."""
    from pycocotools import mask as rle

    if isinstance(segmentation, list):
        return rle.merge(rle.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return rle.frPyObjects(segmentation, height, width)
    return segmentation


def _mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    from pycocotools import mask as rle

    mask: NDArray[np.uint8] = rle.decode(_encoded(segmentation, height, width))
    return mask

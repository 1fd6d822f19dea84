"""Ground truth in COCO's format, and average precision from it by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hora.core.errors import MissingExtraError
from hora.workloads.scenes.sample import Sample

__all__ = ["average_precision", "need_pycocotools", "of_samples"]


def of_samples(samples: Sequence[Sample], classes: Sequence[str]) -> Mapping[str, Any]:
    """COCO's ``images``, ``annotations`` and ``categories`` of samples that have masks.

    Image ids are the samples' numbers; category ids are the labels plus 1.
    """
    need_pycocotools()
    from pycocotools import mask as rle

    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for sample in samples:
        height, width = sample.pixels.shape[:2]
        images.append({"id": sample.number, "height": height, "width": width})
        assert sample.masks is not None
        for box, label, mask in zip(sample.boxes, sample.labels, sample.masks, strict=True):
            left, top, right, bottom = (float(edge) for edge in box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": sample.number,
                    "category_id": int(label) + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": int(mask.sum()),
                    "segmentation": rle.encode(np.asfortranarray(mask)),
                    "iscrowd": 0,
                }
            )
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": index + 1, "name": name} for index, name in enumerate(classes)],
    }


def average_precision(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kind: Literal["bbox", "segm"]
) -> float:
    """COCO's AP: the mean over classes, and over the thresholds 0.50, 0.55, ... 0.95 of the overlap.

    Args:
        truth: as :func:`of_samples` gives it.
        results: detections in COCO's results format: ``image_id``, ``category_id``, ``score``, and ``bbox``
            (left, top, width, height) or ``segmentation`` (run lengths).
        kind: by boxes or by masks.

    Raises:
        MissingExtraError: pycocotools is not installed.
    """
    need_pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not results:
        return 0.0  # pycocotools takes no empty list
    with contextlib.redirect_stdout(io.StringIO()):  # it prints tables
        wanted = COCO()
        wanted.dataset = {**truth, "info": {}}
        wanted.createIndex()
        evaluation = COCOeval(wanted, wanted.loadRes([dict(result) for result in results]), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def need_pycocotools() -> None:
    """Raise MissingExtraError when pycocotools is not installed."""
    try:
        import pycocotools  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "Average precision is computed by pycocotools.", fix="Run `pip install 'hora[workloads]'`."
        ) from None

"""Average precision over all ranks: each detects on its share of the pictures, rank 0 computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

import hora.torch as hora
from hora.workloads.scenes.batches import Batch
from hora.workloads.scenes.learner import Detected, Learner, agree_on_statistics
from hora.workloads.scenes.sample import Pictures
from hora.workloads.scenes.truth import average_precision

__all__ = ["evaluate", "results"]


def evaluate(learner: Learner, pictures: Pictures, loader: Iterable[Batch]) -> dict[str, float]:
    """AP by boxes (``bbox``), and by masks (``segm``) where the targets have them. Every rank calls it.

    Pictures without any detection count as they should: all numbers that the loaders gave are looked at.

    Args:
        learner: what detects.
        pictures: the test split.
        loader: of all ranks together every picture once.

    Returns:
        The same on every rank.
    """
    agree_on_statistics(learner.model)
    seen: list[int] = []
    found: list[dict[str, Any]] = []
    for batch in loader:
        if len(batch.numbers):
            seen += batch.numbers.tolist()
            found += results(learner.detect(batch), batch, pictures)
    everything = hora.allgather_object((seen, found), name="detections")
    values: dict[str, float] = {}
    with hora.only(0, reason="average precision") as mine:  # COCO's 5,000 pictures take a minute
        if mine:
            numbers = sorted(number for rank, _ in everything for number in rank)
            # In the order of pictures, so that equal scores are ranked alike by any number of workers.
            rows = sorted((row for _, rank in everything for row in rank), key=lambda row: row["image_id"])
            truth = pictures.truth(numbers)
            for kind in learner.profile.targets:
                values[kind] = average_precision(truth, rows, cast('Literal["bbox", "segm"]', kind))
    return cast("dict[str, float]", hora.broadcast_object(values, root_rank=0, name="average precision"))


def results(detected: Sequence[Detected], batch: Batch, pictures: Pictures) -> list[dict[str, Any]]:
    """Detections in COCO's results format, in pixels of the pictures as they are in the data set."""
    rows: list[dict[str, Any]] = []
    for each, size in zip(detected, batch.sizes.tolist(), strict=True):
        height, width = pictures.size(each.number)
        scale = np.array((width / size[1], height / size[0]) * 2)
        boxes = each.boxes.double().cpu().numpy() * scale
        masks = None if each.masks is None else _encode(each.masks, (height, width), size)
        for index, (box, label, score) in enumerate(
            zip(boxes, each.labels.tolist(), each.scores.tolist(), strict=True)
        ):
            left, top, right, bottom = box.tolist()
            row: dict[str, Any] = {
                "image_id": each.number,
                "category_id": label + 1,
                "score": score,
                "bbox": [left, top, right - left, bottom - top],
            }
            if masks is not None:
                row["segmentation"] = masks[index]
            rows.append(row)
    return rows


def _encode(masks: Any, whole: tuple[int, int], size: Sequence[int]) -> list[Mapping[str, Any]]:
    from pycocotools import mask as rle

    pixels = masks[:, : size[0], : size[1]].cpu().numpy().astype(np.uint8)
    if tuple(size) != whole:
        pixels = np.stack([_resize(mask, whole) for mask in pixels]) if len(pixels) else pixels
    return [rle.encode(np.asfortranarray(mask)) for mask in pixels]


def _resize(mask: Any, whole: tuple[int, int]) -> Any:
    from PIL import Image

    image = Image.fromarray(mask * np.uint8(255)).resize((whole[1], whole[0]), Image.Resampling.BILINEAR)
    return (np.array(image) > 127).astype(np.uint8)

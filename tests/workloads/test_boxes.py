"""Boxes, suppression and RoIAlign against references that loop over numbers in float64.

Where torchvision is installed the same references test its operations too, since Hora uses them there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hora.workloads.scenes import boxes, compiled, regions

Array = np.ndarray[Any, np.dtype[np.float64]]
WAYS = [
    "plain",
    pytest.param(
        "torchvision",
        marks=pytest.mark.skipif(compiled.torchvision_ops() is None, reason="torchvision is not installed"),
    ),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "plain":
        monkeypatch.setattr(boxes, "torchvision_ops", lambda: None)
        monkeypatch.setattr(regions, "torchvision_ops", lambda: None)
    return request.param


def random_boxes(count: int, side: float, seed: int) -> torch.Tensor:
    draws = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    corner = draws[:, :2] * side * 0.7
    return torch.cat((corner, corner + 1 + draws[:, 2:] * side * 0.3), dim=1)


def reference_overlap(a: Array, b: Array) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union > 0 else 0.0


def test_overlap_on_paper_and_against_loops() -> None:
    one = torch.tensor([[0.0, 0.0, 4.0, 2.0]])
    others = torch.tensor(
        [[2.0, 1.0, 6.0, 3.0], [0.0, 0.0, 4.0, 2.0], [4.0, 0.0, 5.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    )
    assert boxes.overlap(one, others).tolist() == [[pytest.approx(2 / 14), 1.0, 0.0, 0.0]]
    first, second = random_boxes(20, 30, 1), random_boxes(15, 30, 2)
    expected = [[reference_overlap(a, b) for b in second.numpy()] for a in first.numpy()]
    np.testing.assert_allclose(boxes.overlap(first, second).numpy(), expected, rtol=1e-12)
    empty = torch.zeros(1, 4)
    assert boxes.overlap(empty, empty).item() == 0.0


def test_decode_undoes_encode() -> None:
    truth, anchors = random_boxes(50, 100, 3), random_boxes(50, 100, 4)
    weights = (10.0, 10.0, 5.0, 5.0)
    differences = boxes.encode(truth, anchors, weights)
    a, b = truth[0].tolist(), anchors[0].tolist()
    assert differences[0].tolist() == pytest.approx(
        [
            10 * ((a[0] + a[2]) / 2 - (b[0] + b[2]) / 2) / (b[2] - b[0]),
            10 * ((a[1] + a[3]) / 2 - (b[1] + b[3]) / 2) / (b[3] - b[1]),
            5 * math.log((a[2] - a[0]) / (b[2] - b[0])),
            5 * math.log((a[3] - a[1]) / (b[3] - b[1])),
        ]
    )
    torch.testing.assert_close(boxes.decode(differences, anchors, weights), truth, rtol=1e-12, atol=1e-12)
    # A wild prediction stays finite: at most 62.5 times the anchor.
    wild = boxes.decode(torch.tensor([0.0, 0, 500, 500]), torch.tensor([0.0, 0, 2, 2]), weights)
    assert (wild[2] - wild[0]).item() == pytest.approx(125)


def test_clip_and_flip() -> None:
    box = torch.tensor([[-3.0, 2.0, 5.0, 30.0]])
    assert boxes.clip(box, 20, 10).tolist() == [[0.0, 2.0, 5.0, 20.0]]
    assert boxes.flip(box, 10).tolist() == [[5.0, 2.0, 13.0, 30.0]]


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7])
def test_suppression_is_the_greedy_one(way: str, threshold: float) -> None:
    dropped = 0
    for seed in range(8):
        found = random_boxes(60, 12, seed)
        found[:, 2:] += 6  # so that they overlap much
        scores = torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        classes = torch.arange(60) % 3
        kept: list[int] = []
        for index in scores.argsort(descending=True).tolist():
            same = [other for other in kept if classes[other] == classes[index]]
            if all(
                reference_overlap(found[other].numpy(), found[index].numpy()) <= threshold for other in same
            ):
                kept.append(index)
        dropped += 60 - len(kept)
        assert boxes.suppress_classes(found, scores, classes, threshold).tolist() == kept
    assert dropped > 8


def test_suppression_follows_chains_and_takes_batches() -> None:
    # Each overlaps its neighbours by 9 of 11, the one after next by 8 of 12: 1 hides 2, which frees 3.
    left = torch.arange(12.0)
    chain = torch.stack((left, left * 0, left + 10, left * 0 + 1), dim=1)
    alone = torch.stack((left * 20, left * 0, left * 20 + 10, left * 0 + 1), dim=1)
    kept = boxes.suppress(torch.stack((chain, alone)), 0.7)
    assert kept.tolist() == [[index % 2 == 0 for index in range(12)], [True] * 12]
    assert boxes.suppress(torch.zeros(0, 4), 0.5).tolist() == []


def reference_align(
    features: Array, box: list[float], *, size: int, scale: float, sampling: int, centred: bool
) -> Array:
    channels, height, width = features.shape
    left, top, right, bottom = (edge * scale - (0.5 if centred else 0.0) for edge in box)
    across, down = right - left, bottom - top
    if not centred:
        across, down = max(across, 1.0), max(down, 1.0)
    out = np.zeros((channels, size, size))
    for i in range(size):
        for j in range(size):
            for a in range(sampling):
                for b in range(sampling):
                    y = top + down * (i + (a + 0.5) / sampling) / size
                    x = left + across * (j + (b + 0.5) / sampling) / size
                    if y < -1 or y > height or x < -1 or x > width:
                        continue
                    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
                    y0, x0 = int(y), int(x)
                    y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
                    v, u = y - y0, x - x0
                    out[:, i, j] += (
                        features[:, y0, x0] * (1 - v) * (1 - u)
                        + features[:, y0, x1] * (1 - v) * u
                        + features[:, y1, x0] * v * (1 - u)
                        + features[:, y1, x1] * v * u
                    ) / sampling**2
    return out


@pytest.mark.parametrize("centred", [False, True])
def test_align_against_loops(way: str, centred: bool) -> None:
    features = torch.rand(2, 3, 7, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [
        # Inside, beyond each edge, far outside, thinner than a pixel.
        torch.tensor(
            [[3.0, 5, 20, 22], [-9, -9, 12, 12], [20, 15, 60, 70], [100, 100, 140, 130], [8, 8, 8.5, 9]],
            dtype=torch.float64,
        ),
        torch.tensor([[0.0, 0, 36, 28]], dtype=torch.float64),
    ]
    options: dict[str, Any] = {"size": 3, "scale": 0.25, "sampling": 2, "centred": centred}
    result = regions.align(features, found, **options)
    expected = [
        reference_align(picture.numpy(), box, **options)
        for picture, rows in zip(features, found, strict=True)
        for box in rows.tolist()
    ]
    np.testing.assert_allclose(result.numpy(), np.stack(expected), rtol=1e-10, atol=1e-12)
    assert not result[3].any()
    none = regions.align(features, [torch.zeros(0, 4, dtype=torch.float64)] * 2, **options)
    assert none.shape == (0, 3, 3, 3)


def test_gradients_of_align(way: str) -> None:
    features = torch.rand(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    found = [torch.tensor([[2.0, 3, 17, 15], [-4, 0, 30, 30]], dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda x: regions.align(x, found, size=2, scale=0.25), (features,))


def test_levels_of_a_pyramid() -> None:
    sides = torch.tensor([10.0, 111.9, 112.1, 223.9, 224.1, 447.9, 448.1, 2000.0])
    squares = torch.stack((sides * 0, sides * 0, sides, sides), dim=1)
    assert regions.levels(squares, first=2, last=5).tolist() == [2, 2, 3, 3, 4, 4, 5, 5]
    small = regions.levels(squares, first=2, last=3, canonical=32, at=3)
    assert small.tolist() == [2, 3, 3, 3, 3, 3, 3, 3]


def test_masks_go_into_a_box_and_come_back() -> None:
    whole = torch.zeros(2, 40, 50)
    whole[0, 10:24, 5:19] = 1  # fills its box
    whole[1, 4:18, 20:34] = torch.ones(14, 14).triu()
    found = torch.tensor([[5.0, 10, 19, 24], [20, 4, 34, 18]])
    small = regions.crop_masks(whole, torch.tensor([0, 1]), found, size=14)
    assert torch.equal(small[0], torch.ones(14, 14))
    assert torch.equal(small[1], torch.ones(14, 14).triu())  # one cell is one pixel
    torch.testing.assert_close(regions.paste(small, found, height=40, width=50), whole, rtol=0, atol=1e-4)
    # Twice as fine or half as fine: the outline moves by less than a pixel.
    for size in (28, 7):
        again = regions.paste(
            regions.crop_masks(whole, torch.tensor([0, 1]), found, size=size), found, height=40, width=50
        )
        assert torch.equal(again[0] > 0.5, whole[0] > 0.5)
        assert ((again[1] > 0.5) != (whole[1] > 0.5)).sum() <= 14

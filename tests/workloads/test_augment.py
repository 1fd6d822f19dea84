from __future__ import annotations

import numpy as np
import pytest

from hora.workloads.resnet.augment import flip_and_shift, uniform


def mix(state: int) -> int:
    """SplitMix64's finalizer in Python's own integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_splitmix_has_its_published_first_output() -> None:
    # The first number of SplitMix64 seeded with 0, as Java's SplittableRandom(0) gives it.
    assert mix(0) == 0xE220A8397B1DCDAF


def test_uniform_is_the_hash_of_seed_epoch_sample_and_draw() -> None:
    numbers = uniform(np.array([5, 7]), seed=3, epoch=2, draws=2)
    for row, sample in enumerate((5, 7)):
        for draw in range(2):
            word = mix(mix(mix(mix(3) ^ 2) ^ sample) ^ draw)
            assert numbers[row, draw] == (word >> 11) / 2**53


def test_a_sample_is_augmented_alike_whoever_reads_it() -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(12, 28, 28), dtype=np.uint8)
    samples = np.arange(100, 112)
    together = flip_and_shift(images, samples, shift=2, seed=1, epoch=3)
    for worker in range(3):
        mine = flip_and_shift(images[worker::3], samples[worker::3], shift=2, seed=1, epoch=3)
        assert np.array_equal(mine, together[worker::3])


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 4}])
def test_seed_and_epoch_matter(change: dict[str, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(12, 28, 28), dtype=np.uint8)
    given = {"seed": 1, "epoch": 3}
    before = flip_and_shift(images, np.arange(12), shift=1, **given)
    after = flip_and_shift(images, np.arange(12), shift=1, **(given | change))
    assert not np.array_equal(before, after)


def test_shift_and_flip_do_what_they_say() -> None:
    image = np.zeros((5, 5), dtype=np.uint8)
    image[1, 1] = 9
    count = 600
    moved = flip_and_shift(np.repeat(image[None], count, axis=0), np.arange(count), shift=1, seed=0, epoch=0)
    places = [tuple(np.argwhere(picture == 9)[0]) for picture in moved]
    # Rows 0 to 2; columns 0 to 2, or 2 to 4 when mirrored. Nothing else may change.
    assert {row for row, _ in places} == {0, 1, 2}
    assert {column for _, column in places} == {0, 1, 2, 3, 4}
    assert (moved.reshape(count, -1).sum(axis=1) == 9).all()
    mirrored = sum(column > 2 for _, column in places) / count
    assert mirrored == pytest.approx(1 / 2 * 2 / 3, abs=0.08)  # 600 throws: 4 standard deviations


def test_no_shift_only_mirrors() -> None:
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)
    for sample in range(8):
        result = flip_and_shift(image, np.array([sample]), shift=0, seed=0, epoch=0)
        assert np.array_equal(result, image) or np.array_equal(result, image[:, :, ::-1])


def test_draws_are_uniform() -> None:
    numbers = uniform(np.arange(50_000), seed=0, epoch=0, draws=1)[:, 0]
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=5 / np.sqrt(12 * 50_000))
    assert numbers.var() == pytest.approx(1 / 12, abs=0.002)

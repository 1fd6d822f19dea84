"""The order of samples against an independent splitmix64, and what shuffling must be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.adapter.order import _mix, epoch_order, sample_seed

MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """``next()`` of Vigna's splitmix64.c: the new state and the output."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def test_the_generator_is_splitmix64() -> None:
    # First outputs of the public reference for seed 1234567.
    state, outputs = 1234567, []
    for _ in range(5):
        state, output = splitmix64(state)
        outputs.append(output)
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), count=st.integers(1, 200))
def test_the_order_sorts_by_the_generators_outputs(seed: int, epoch: int, count: int) -> None:
    state = _mix(_mix(seed + 0x9E3779B97F4A7C15) + epoch * 0x9E3779B97F4A7C15)
    keys = []
    for _ in range(count):
        state, output = splitmix64(state)
        keys.append(output)
    order = epoch_order(count, seed=seed, epoch=epoch, shuffle=True)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(count), key=keys.__getitem__)


def test_orders_differ_between_seeds_and_epochs() -> None:
    orders = {
        tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True))
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64
    assert epoch_order(5, seed=3, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_every_sample_is_equally_likely_at_every_place() -> None:
    count, epochs = 8, 4000
    orders = np.array([epoch_order(count, seed=1, epoch=epoch, shuffle=True) for epoch in range(epochs)])
    for place in range(count):
        found = np.bincount(orders[:, place], minlength=count)
        # Chi-squared with 7 degrees of freedom: above 29.9 with a probability of 1e-4.
        assert ((found - epochs / count) ** 2 / (epochs / count)).sum() < 29.9


def test_sample_seeds_differ_in_every_argument() -> None:
    seeds = {
        sample_seed(seed=seed, epoch=epoch, position=position)
        for seed in range(10)
        for epoch in range(10)
        for position in range(100)
    }
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**64 for seed in seeds)

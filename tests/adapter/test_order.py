"""The order of samples against an independent splitmix64, and what shuffling must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.adapter.order import Epochs, Tail, _mix, check_global_batch, epoch_order, sample_seed, share
from hora.core.errors import GlobalBatchError, UsageError

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


def epoch(epochs: Epochs, size: int, *, steps: int | None = None) -> list[list[list[int]]]:
    """Step -> rank -> samples of one epoch, broken off after so many steps."""
    began = epochs.state_dict()
    found: list[list[list[int]]] = []
    for rank in range(size):
        mine = Epochs(
            samples=epochs.samples,
            global_batch=epochs.global_batch,
            seed=epochs._seed,
            shuffle=epochs._shuffle,
            tail=epochs._tail,
        )
        mine.load_state_dict(began)
        for step, chosen in enumerate(mine._indices(mine._begin(), rank=rank, size=size)):
            if rank == 0:
                found.append([])
            found[step].append(chosen.tolist())
            if step + 1 == steps:
                break
        ended = mine.state_dict()
    epochs.load_state_dict(ended)
    return found


def flat(steps: list[list[list[int]]]) -> list[list[int]]:
    return [[sample for part in step for sample in part] for step in steps]


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(4, 70),
    parts=st.integers(1, 5),
    size=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad", "uneven"]),
    shuffle=st.booleans(),
)
def test_any_number_of_workers_sees_what_one_sees(
    samples: int, parts: int, size: int, tail: Tail, shuffle: bool
) -> None:
    batch = parts * size

    def fresh(global_batch: int = batch) -> Epochs:
        return Epochs(samples=samples, global_batch=global_batch, seed=3, shuffle=shuffle, tail=tail)

    many, one = fresh(), fresh()
    for number in range(2):
        steps = epoch(many, size)
        assert flat(steps) == flat(epoch(one, 1))
        order = epoch_order(samples, seed=3, epoch=number, shuffle=shuffle).tolist()
        whole = samples // batch * batch
        if tail == "drop":
            expected = order[:whole]
        elif tail == "uneven":
            expected = order
        else:
            expected = [order[place % samples] for place in range(-(-samples // batch) * batch)]
        assert [sample for step in flat(steps) for sample in step] == expected
        assert len(steps) == len(one) == len(fresh())
        for step in steps:
            lengths = [len(part) for part in step]
            assert max(lengths) - min(lengths) <= (tail == "uneven")
        if not steps:
            return  # a global batch larger than the data: check_global_batch refuses it
        assert many.epoch == number + 1
    # Broken off, and gone on with another number of workers and another global batch.
    broken = fresh()
    first = flat(epoch(broken, size, steps=1))[0]
    assert broken.state_dict() == {"position": samples if len(fresh()) == 1 else batch}
    if len(fresh()) > 1:
        rest = Epochs(samples=samples, global_batch=1, seed=3, shuffle=shuffle, tail="uneven")
        rest.load_state_dict(broken.state_dict())
        assert rest.remaining == samples - batch
        order = epoch_order(samples, seed=3, epoch=0, shuffle=shuffle).tolist()
        assert first + [sample for step in flat(epoch(rest, 1)) for sample in step] == order


def test_iterators_that_another_has_replaced_say_so() -> None:
    epochs = Epochs(samples=8, global_batch=4, seed=0, shuffle=False, tail="drop")
    old = epochs._indices(epochs._begin(), rank=0, size=1)
    assert next(old).tolist() == [0, 1, 2, 3]
    epochs._begin()
    with pytest.raises(UsageError, match="stale"):
        next(old)
    with pytest.raises(UsageError, match="is not the state"):
        epochs.load_state_dict({"position": -1})


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_shares_are_neighbours_of_nearly_equal_lengths(start: int, count: int, size: int) -> None:
    found = [share(start, start + count, rank=rank, size=size) for rank in range(size)]
    assert [place for first, last in found for place in range(first, last)] == list(
        range(start, start + count)
    )
    lengths = [last - first for first, last in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"global_batch": 0}, "not a positive whole number"),
        ({"global_batch": True}, "not a positive whole number"),
        ({"samples": 0}, "The data set is empty"),
        ({"samples": 3}, "fewer than the 4 workers"),
        ({"global_batch": 10}, r"Use 8 or 12, or pass tail='uneven'"),
        ({"global_batch": 2}, r"Use 4, or pass"),
        ({"global_batch": 64}, r"Use at most 48"),
    ],
)
def test_global_batches_that_do_not_fit_are_refused(wrong: dict[str, int], text: str) -> None:
    given_all = {"global_batch": 8, "samples": 50} | wrong
    with pytest.raises(GlobalBatchError, match=text):
        check_global_batch(**given_all, size=4, tail="drop", uneven=False)

"""What is drawn from a data set's random generators, as their states tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hora.torch.watch._generators import drawn, generators_of, states

shared = random.Random(5)

MAKE: dict[str, tuple[Callable[[int], Any], Callable[[Any, int], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g, n: torch.rand(n, generator=g)),
    "python": (random.Random, lambda g, n: [g.random() for _ in range(n)]),
    "numpy": (numpy.random.default_rng, lambda g, n: g.random(n)),
    "old numpy": (numpy.random.RandomState, lambda g, n: g.random_sample(n)),
}


def noise(generator: Any, draw: Callable[[], Any], *, samples: int = 16) -> dict[str, str]:
    before = states([generator])
    draw()
    return drawn(before, states([generator]), samples=samples)


@pytest.mark.parametrize("kind", MAKE)
def test_noise_from_the_same_state_is_the_same_whatever_was_left(kind: str) -> None:
    make, draw = MAKE[kind]
    first, second, other = make(1), make(1), make(2)
    one = noise(first, lambda: draw(first, 40))
    assert set(one) == {"own"}
    assert noise(second, lambda: draw(second, 50)) == one
    assert noise(other, lambda: draw(other, 40)) != one
    assert noise(first, lambda: draw(first, 40)) != one  # it has gone on


@pytest.mark.parametrize("kind", MAKE)
def test_a_few_numbers_are_a_decision(kind: str) -> None:
    make, draw = MAKE[kind]
    generator = make(1)
    assert noise(generator, lambda: draw(generator, 2)) == {}  # fresh: a Mersenne Twister makes a round first
    assert noise(generator, lambda: draw(generator, 2)) == {}
    assert noise(generator, lambda: None) == {}


def test_a_generator_that_each_sample_seeds_draws_what_belongs_to_the_sample() -> None:
    one, two = random.Random(1), random.Random(1)

    def seeded(generator: random.Random, seed: int) -> None:
        generator.seed(seed)
        MAKE["python"][1](generator, 200)

    assert noise(one, lambda: seeded(one, 3)) != noise(two, lambda: seeded(two, 4))


def test_the_global_generators_are_told_apart() -> None:
    before = states([])
    torch.rand(20)
    numpy.random.random(20)
    assert set(drawn(before, states([]), samples=16)) == {"torch", "numpy"}


class Transform:
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)


class Kept(Dataset[int]):
    def __init__(self) -> None:
        self.transforms = [Transform(), lambda x: x]
        self.options: dict[str, Any] = {"generator": torch.Generator()}
        self.again = self

    def __getitem__(self, index: int) -> int:
        return shared.randrange(index)


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        yield self.rng.randrange(5)


def test_generators_are_found_inside_a_data_set_and_behind_its_methods() -> None:
    dataset = Kept()
    found = generators_of(dataset)
    wanted = [dataset.transforms[0].rng, dataset.options["generator"], shared]  # type: ignore[union-attr]
    assert {id(generator) for generator in found} == {id(generator) for generator in wanted}
    assert generators_of(Stream()) == []
    assert generators_of([1, 2, 3]) == []

"""The loader: N workers together see what one worker sees, and resume anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import ranks
from torch.utils.data import Dataset, IterableDataset

import hora.torch as hora
from hora.adapter.order import share
from hora.core.errors import GlobalBatchError, UsageError
from hora.core.events import Timeline
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch import _context
from hora.torch._presence import Presence


class Numbers(Dataset[Any]):
    """Sample ``i`` is ``i``, and a little of each kind of randomness."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64), "name": f"sample {index}"}


def tensors(count: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(count), torch.arange(count) * 10


class Job:
    """Plays all ranks of a job one after the other: a loader only asks who it is, and never communicates."""

    def __init__(self, size: int) -> None:
        self.size = size

    def loaders(self, count: int, **options: Any) -> list[hora.Loader]:
        return self.each(lambda: hora.data_loader(tensors(count), **options))

    def each(self, function: Any) -> list[Any]:
        results = []
        for rank in range(self.size):
            with self.as_rank(rank):
                results.append(function())
        return results

    def as_rank(self, rank: int) -> _Playing:
        return _Playing(World(rank=rank, size=self.size, local_rank=rank, local_size=self.size))

    def epoch(self, loaders: list[hora.Loader], *, steps: int | None = None) -> list[list[list[int]]]:
        """Step -> rank -> samples of one epoch, broken off after ``steps``."""
        found: list[list[list[int]]] = []
        for rank, loader in enumerate(loaders):
            with self.as_rank(rank):
                for step, (index, _) in enumerate(loader):
                    if rank == 0:
                        found.append([])
                    found[step].append(index.tolist())
                    if steps is not None and step + 1 == steps:
                        break
        return found


class _Playing:
    def __init__(self, world: World) -> None:
        timeline = Timeline(None, rank=world.rank)
        cpu = torch.device("cpu")
        group: Any = None
        self._context = _context.Context(
            world=world,
            device=cpu,
            settings=Settings(),
            group=group,
            control=cpu,
            timeline=timeline,
            run=None,
            where="",
            peers=(world.rank,),
            presence=Presence(torch.distributed.HashStore(), "", rank=world.rank, size=world.size, timeout=1),
        )

    def __enter__(self) -> None:
        _context.current.context = self._context

    def __exit__(self, *error: object) -> None:
        _context.current.context = None


def union(steps: list[list[list[int]]]) -> list[list[int]]:
    return [[index for part in step for index in part] for step in steps]


SHAPES = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.integers(size, 60),
        st.integers(1, 6).map(lambda part: part * size),
        st.integers(0, 5),
    )
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["drop", "pad", "uneven"]), st.booleans())
def test_all_workers_together_see_what_one_worker_sees(
    shape: tuple[int, int, int, int], tail: Any, shuffle: bool
) -> None:
    size, count, batch, seed = shape
    if tail == "drop" and batch > count:
        return
    options = {"global_batch": batch, "seed": seed, "tail": tail, "shuffle": shuffle}
    many, one = Job(size), Job(1)
    ours, single = many.loaders(count, **options), one.loaders(count, **options)
    for _ in range(2):
        steps = many.epoch(ours)
        assert union(steps) == union(one.epoch(single))
        assert len(steps) == len(ours[0])
        seen = [index for step in union(steps) for index in step]
        if tail == "uneven":
            assert sorted(seen) == list(range(count))
            assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)
        elif tail == "drop":
            assert len(seen) == len(set(seen)) == count // batch * batch
        else:
            assert len(seen) == count + ours[0].padded
            assert seen[count:] == [seen[place % count] for place in range(ours[0].padded)]
            assert sorted(seen[:count]) == list(range(count))
        if not shuffle:
            assert seen[:count] == list(range(min(len(seen), count)))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(0, 40), st.sampled_from(["drop", "pad", "uneven"]))
def test_a_resumed_job_of_another_size_goes_on_exactly(
    shape: tuple[int, int, int, int], other: int, stop: int, tail: Any
) -> None:
    size, count, batch, seed = shape
    batch *= other
    if count < other or (tail == "drop" and batch > count):
        return
    options = {"global_batch": batch, "seed": seed, "tail": tail}
    whole: list[list[int]] = []
    straight, reference = Job(size), Job(size).loaders(count, **options)
    for _ in range(3):
        whole += union(straight.epoch(reference))
    before = Job(size).loaders(count, **options)
    taken: list[list[int]] = []
    while len(taken) < min(stop, len(whole)):
        taken += union(Job(size).epoch(before, steps=min(stop, len(whole)) - len(taken)))
    state = before[0].state_dict()
    assert set(state) == {"position"}
    after = Job(other).loaders(count, **options)
    for loader in after:
        loader.load_state_dict(state)
    while len(taken) < len(whole):
        taken += union(Job(other).epoch(after))
    assert taken == whole


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 50), st.integers(1, 9))
def test_shares_are_contiguous_and_even(start: int, count: int, size: int) -> None:
    parts = [share(start, start + count, rank=rank, size=size) for rank in range(size)]
    assert [place for low, high in parts for place in range(low, high)] == list(range(start, start + count))
    lengths = [high - low for low, high in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_epochs_count_themselves_and_breaking_out_ends_one() -> None:
    with Job(1).as_rank(0):
        loader = hora.data_loader(tensors(10), global_batch=4, seed=3, tail="uneven")
        first = [index.tolist() for index, _ in loader]
        assert (len(loader), loader.epoch, loader.state_dict()) == (3, 1, {"position": 10})
        for index, _ in loader:
            assert index.tolist() != first[0]
            assert (loader.epoch, loader.state_dict()) == (1, {"position": 14})
            break
        epochs = []
        for _ in loader:
            epochs.append(loader.epoch)
        assert epochs == [2, 2, 2]
        assert loader.epoch == 3
        loader.load_state_dict({"position": 4})
        assert (loader.epoch, loader.remaining) == (0, 2)
        assert [index.tolist() for index, _ in loader] == first[1:]
        assert loader.remaining == 3


def test_an_iterator_that_was_replaced_says_so() -> None:
    with Job(1).as_rank(0):
        loader = hora.data_loader(tensors(10), global_batch=2)
        old = iter(loader)
        next(old)
        next(iter(loader))
        with pytest.raises(UsageError, match="stale"):
            next(old)


def test_samples_per_worker_is_exact_for_uneven_tails() -> None:
    with Job(4).as_rank(1):
        loader = hora.data_loader(tensors(11), global_batch=8, tail="uneven")
        assert [(len(index), loader.samples_per_worker) for index, _ in loader] == [(2, 2.0), (1, 0.75)]


@ranks(1, 3)
def test_what_is_random_in_a_sample_belongs_to_its_position() -> None:
    def noises(**options: Any) -> dict[tuple[int, int], list[float]]:
        loader = hora.data_loader(Numbers(20), global_batch=6, seed=5, tail="uneven", **options)
        mine = {}
        for epoch in range(2):
            for batch in loader:
                for index, noise in zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True):
                    mine[epoch, index] = noise
        return {key: noise for part in hora.allgather_object(mine) for key, noise in part.items()}

    torch.manual_seed(hora.rank())
    random.seed(hora.rank())
    before = torch.get_rng_state().clone(), random.getstate()
    inline = noises()
    assert torch.equal(torch.get_rng_state(), before[0])  # the script's own numbers are left alone
    assert random.getstate() == before[1]
    processes = noises(num_workers=2)
    assert inline == processes
    assert len({tuple(noise) for noise in inline.values()}) == len(inline) == 40
    assert inline == noises(num_workers=1, persistent_workers=True)
    reference = hora.broadcast_object(inline, 0)
    assert inline == reference


def test_noise_is_the_same_for_any_number_of_workers() -> None:
    found = []
    for size in (1, 2, 3):
        parts = Job(size).each(
            lambda: [
                (index, noise)
                for batch in hora.data_loader(Numbers(20), global_batch=6, seed=5)
                for index, noise in zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True)
            ]
        )
        found.append(sorted(pair for part in parts for pair in part))
    assert found[0] == found[1] == found[2]


def test_empty_batches_have_the_form_of_any_other() -> None:
    with Job(4).as_rank(3):
        loader = hora.data_loader(Numbers(10), global_batch=8, tail="uneven", shuffle=False)
        whole, empty = list(loader)
        assert whole["name"] == ["sample 6", "sample 7"]
        assert (empty["index"].shape, empty["index"].dtype) == ((0,), torch.int64)
        assert (empty["noise"].shape, empty["name"]) == ((0, 3), [])
        pairs = list(hora.data_loader([(torch.ones(2), i) for i in range(10)], global_batch=8, tail="uneven"))
        assert [tuple(part.shape) for part in pairs[1]] == [(0, 2), (0,)]


def test_breaking_out_stops_the_loader_processes() -> None:
    with Job(1).as_rank(0):
        loader = hora.data_loader(Numbers(40), global_batch=2, num_workers=2, shuffle=False)
        for batch in loader:
            assert batch["index"].tolist() == [0, 1]
            assert loader.state_dict() == {"position": 2}  # not what was loaded ahead
            break
        del batch
        assert next(iter(loader))["index"].tolist() == [0, 1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    ("size", "count", "options", "match"),
    [
        (
            4,
            1000,
            {"global_batch": 250},
            r"global_batch=250 does not divide among 4 workers. Use 248 or 252, or",
        ),
        (4, 100, {"global_batch": 3}, "Use 4, or pass tail='uneven'"),
        (4, 3, {"global_batch": 4}, "3 samples, fewer than the 4 workers.*at most 3 workers"),
        (3, 1, {"global_batch": 4}, "1 sample, fewer than the 3 workers.*at most 1 worker:"),
        (
            2,
            10,
            {"global_batch": 12},
            "global_batch=12 is larger than the data set, which has 10.*Use at most 10",
        ),
        (1, 10, {"global_batch": 0}, "global_batch=0 is not a positive whole number"),
        (1, 10, {"global_batch": 2.0}, "global_batch=2.0 is not"),
        (1, 10, {"global_batch": True}, "global_batch=True is not"),
        (1, 0, {"global_batch": 4}, "data set is empty"),
    ],
)
def test_global_batches_that_do_not_fit(size: int, count: int, options: Any, match: str) -> None:
    with Job(size).as_rank(0), pytest.raises(GlobalBatchError, match=match):
        hora.data_loader(tensors(count), **options)


def test_data_sets_that_do_not_fit() -> None:
    with Job(1).as_rank(0):
        for dataset, options, match in (
            (Stream(), {}, "Stream cannot be indexed"),
            ((torch.ones(3), torch.ones(4)), {}, r"equal first dimensions.*\(3,\), \(4,\)"),
            ((torch.ones(()),), {}, "equal first dimensions"),
            ((), {}, "equal first dimensions"),
            (tensors(4), {"num_workers": 1}, "TensorDataset"),
            (tensors(4), {"tail": "keep"}, "tail='keep' is unknown"),
        ):
            with pytest.raises(UsageError, match=match):
                hora.data_loader(dataset, global_batch=1, **options)
        with pytest.raises(UsageError, match="not the state of a data loader"):
            hora.data_loader(tensors(4), global_batch=1).load_state_dict({"epoch": 1})

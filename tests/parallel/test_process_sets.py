"""Collectives among some of the ranks."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.core.settings import Settings
from hora.core.world import World


@ranks(3, 4)
def test_every_operation_on_a_set() -> None:
    size, rank = hora.size(), hora.rank()
    members = [0, size - 1]
    outer = hora.add_process_set(hora.ProcessSet(reversed(members)))
    inner = hora.add_process_set(range(1, size - 1))
    assert (outer.ranks, inner.ranks) == (members, list(range(1, size - 1)))
    assert (outer.process_set_id, inner.process_set_id) == (1, 2)
    assert hora.process_set_ids() == [0, 1, 2]
    assert outer.included() == hora.process_set_included(1) == (rank in members)
    assert (outer.size(), outer.rank()) == (2, members.index(rank) if rank in members else None)
    mine = outer if outer.included() else inner
    ranks_ = mine.ranks
    assert ranks_ is not None
    count, place = len(ranks_), ranks_.index(rank)
    one = torch.full((2,), rank + 1.0, requires_grad=True)
    total = float(sum(ranks_) + count)
    assert hora.allreduce(one, op=hora.Sum, process_set=mine).tolist() == [total] * 2
    assert hora.allreduce(one, process_set=mine).tolist() == [total / count] * 2
    assert hora.allgather(one[:1], process_set=mine).tolist() == [other + 1.0 for other in ranks_]
    assert hora.broadcast(one, ranks_[-1], process_set=mine).tolist() == [ranks_[-1] + 1.0] * 2
    rows = torch.arange(float(count)) + 10 * rank
    assert hora.alltoall(rows, process_set=mine).tolist() == [place + 10.0 * other for other in ranks_]
    assert hora.reducescatter(rows, op=hora.Sum, process_set=mine).tolist() == [
        count * place + 10.0 * sum(ranks_)
    ]
    assert hora.broadcast_object({"from": rank}, ranks_[-1], process_set=mine) == {"from": ranks_[-1]}
    assert hora.allgather_object(rank, process_set=mine) == ranks_
    hora.barrier(process_set=mine)
    (gradient,) = torch.autograd.grad(hora.allgather(one, process_set=mine).sum() * (place + 1), one)
    assert gradient.tolist() == [sum(range(1, count + 1))] * 2
    other = inner if mine is outer else outer
    with pytest.raises(CollectiveError, match=rf"rank {rank} is not in ProcessSet\(process_set_id="):
        hora.allreduce(one, process_set=other)
    outside = next(iter(set(range(size)) - set(ranks_)))
    with pytest.raises(CollectiveError, match=f"root_rank={outside} is not in"):
        hora.broadcast(one, outside, process_set=mine)
    hora.barrier()


@ranks(2)
def test_sets_come_and_go() -> None:
    assert hora.global_process_set.ranks == [0, 1]
    assert (hora.global_process_set.process_set_id, hora.global_process_set.size()) == (0, 2)
    assert hora.global_process_set.rank() == hora.rank()
    assert not hora.remove_process_set(hora.global_process_set)
    single = hora.ProcessSet([1])
    assert (single.size(), single.rank(), single.included()) == (None, None, None)
    with pytest.raises(CollectiveError, match="was not added"):
        hora.allreduce(torch.ones(1), process_set=single)
    for number in (1, 2, 3):
        assert hora.add_process_set(single) is single
        assert single.process_set_id == number
        if hora.rank() == 1:
            assert hora.allreduce(torch.ones(1), op=hora.Sum, process_set=single) == 1
        assert hora.remove_process_set(single)
        assert single.process_set_id is None
        assert not hora.remove_process_set(single)
    with pytest.raises(CollectiveError, match="no process set with id 1"):
        hora.process_set_included(1)
    for wrong, match in (
        ([], "it is empty"),
        ([0, 2], "2 is no rank"),
        ([0, 0], "one is repeated"),
        ([1, 0], "exists already: its id is 0"),
        ([hora.rank()], r"rank 0 gave|differ between ranks: number 0 is \[0\] on rank 0 and \[1\] on rank 1"),
    ):
        with pytest.raises(CollectiveError, match=match):
            hora.add_process_set(wrong)
    with pytest.raises(CollectiveError, match="not int"):
        hora.ProcessSet(3)  # type: ignore[arg-type]
    hora.barrier()


def test_sets_of_init_end_with_the_job() -> None:
    run_ranks(2, check_sets_of_init, init=False)


def check_sets_of_init(world: World, settings: Settings) -> None:
    first = hora.ProcessSet([0])
    for _ in range(2):
        hora.init(world, settings=settings, process_sets=[first, hora.ProcessSet([1])])
        assert first.process_set_id == 1
        assert hora.process_set_ids() == [0, 1, 2]
        hora.shutdown()
        assert first.process_set_id is None
        assert first.size() is None
    hora.init(world, settings=settings, process_sets="dynamic")
    assert hora.process_set_ids() == [0]
    hora.shutdown()
    assert hora.global_process_set.ranks is None

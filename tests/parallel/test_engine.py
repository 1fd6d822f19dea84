"""The shared-memory engine, through ``torch.distributed``: what every rank gets, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankFailure, ranks, run_ranks

import hora.torch as hora
from hora.core import futex
from hora.core.errors import CollectiveError
from hora.torch.engines import LARGE, Group, _team
from hora.torch.engines._team import SLOT

SIZES = [0, 1, 5, 1000, LARGE // 8, LARGE // 8 + 1, SLOT // 8, SLOT // 8 + 1, SLOT // 4 + 77]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
OPERATIONS = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
}


def group() -> Group:
    found = dist.group.WORLD
    assert isinstance(found, Group)
    return found


def values(rank: int, count: int, dtype: torch.dtype, *, salt: int = 0) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def everyone(count: int, dtype: torch.dtype, **more: Any) -> torch.Tensor:
    return torch.stack([values(rank, count, torch.float64, **more) for rank in range(hora.size())])


def assert_same_everywhere(tensor: torch.Tensor) -> None:
    digest = hora.allgather_object(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    assert len(set(digest)) == 1


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", SIZES)
def test_sums_of_every_size(count: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        tensor = values(hora.rank(), count, dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.double(), everyone(count, dtype).sum(0))


@ranks(1, 2, 3, 4)
def test_every_dtype_and_operation() -> None:
    for salt, dtype in enumerate([*FLOATS, *INTEGERS, *UNSIGNED]):
        for operation, reference in OPERATIONS.items():
            tensor = values(hora.rank(), 37, dtype, salt=salt)
            dist.all_reduce(tensor, operation)
            assert torch.equal(tensor.double(), reference(everyone(37, dtype, salt=salt))), (dtype, operation)


@ranks(3)
def test_unsigned_numbers_have_their_own_order() -> None:
    for dtype in (torch.uint8, *UNSIGNED):
        most = torch.iinfo(dtype).max
        tensor = torch.tensor([most if hora.rank() == 1 else 1, hora.rank()], dtype=dtype)
        least = tensor.clone()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        assert (tensor.tolist(), least.tolist()) == ([most, 2], [1, 0])


@ranks(2, 3)
def test_truth_and_bits_and_complex_numbers() -> None:
    last = hora.size() - 1
    flag = torch.tensor([hora.rank() == last, True, False])
    any_, all_ = flag.clone(), flag.clone()
    dist.all_reduce(any_, dist.ReduceOp.MAX)
    dist.all_reduce(all_, dist.ReduceOp.MIN)
    assert (any_.tolist(), all_.tolist()) == ([True, True, False], [False, True, False])
    bits = torch.tensor([1 << hora.rank()])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == 2 ** hora.size() - 1
    number = torch.full((3,), complex(1, hora.rank()))
    dist.all_reduce(number)
    assert number.tolist() == [complex(hora.size(), sum(range(hora.size())))] * 3


@ranks(2, 3, 4)
def test_half_precision_is_rounded_once() -> None:
    tensor = torch.full((8,), 1.0 if hora.rank() == 0 else 2.0**-8, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    exact = torch.tensor(1 + (hora.size() - 1) * 2.0**-8, dtype=torch.float64)
    assert torch.equal(tensor, exact.to(torch.bfloat16).expand(8))


@ranks(2, 3, 4)
def test_all_ranks_get_the_same_bits() -> None:
    for count in (7, SLOT // 4 + 33):
        torch.manual_seed(hora.rank())
        tensor = torch.randn(count) * 10 ** torch.linspace(-6, 6, count)
        dist.all_reduce(tensor)
        assert_same_everywhere(tensor)


@ranks(2, 3)
def test_a_tensor_in_any_memory_order() -> None:
    rank, size = hora.rank(), hora.size()
    base = torch.arange(24.0).view(2, 3, 2, 2)
    for tensor in (
        base.clone().to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 2, 4)[..., ::2].copy_(base),
        base.clone().transpose(0, 1),
    ):
        expected = tensor * sum(range(1, size + 1))
        tensor.mul_(rank + 1)
        strides = tensor.stride()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)
        assert tensor.stride() == strides
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == sum(range(size))


@ranks(2)
def test_inference_tensors_and_parameters() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        later = torch.ones(3)
        work = dist.all_reduce(later, async_op=True)
    work.wait()
    assert tensor.tolist() == later.tolist() == [2, 2, 2]
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter**2).sum()
    dist.all_reduce(parameter.data)
    dist.broadcast(parameter, 0)
    loss.backward()  # the engine's writing is no change that autograd must know of
    assert parameter.grad is not None
    assert parameter.tolist() == [2, 2, 2]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [0, 3, SLOT // 8 + 5])
def test_collectives_that_move_data(count: int) -> None:
    rank, size = hora.rank(), hora.size()
    mine = values(rank, count, torch.float64)
    expected = everyone(count, torch.float64)
    outputs = [torch.empty(count, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(outputs, mine)
    assert torch.equal(torch.stack(outputs), expected)
    flat = torch.empty(size * count, dtype=torch.float64)
    dist.all_gather_single(flat, mine)
    assert torch.equal(flat.view(size, count), expected)
    for root in range(size):
        copy = mine.clone()
        dist.broadcast(copy, root)
        assert torch.equal(copy, expected[root])
        total = mine.clone()
        dist.reduce(total, root)
        assert torch.equal(total, expected.sum(0) if rank == root else mine)
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, gathered, root)
        assert gathered is None or torch.equal(torch.stack(gathered), expected)
        part = torch.empty_like(mine)
        dist.scatter(part, list(expected + root) if rank == root else None, root)
        assert torch.equal(part, expected[rank] + root)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [1, 10, SLOT // 8 + 5])
def test_reduce_scatter(count: int) -> None:
    rank, size = hora.rank(), hora.size()
    mine = values(rank, size * count, torch.float64)
    expected = everyone(size * count, torch.float64).sum(0).view(size, count)[rank]
    output = torch.empty(count, dtype=torch.float64)
    dist.reduce_scatter_single(output, mine)
    assert torch.equal(output, expected)
    output.zero_()
    dist.reduce_scatter(output, [part.clone() for part in mine.chunk(size)])
    assert torch.equal(output, expected)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("scale", [1, SLOT // 16])
def test_all_to_all_with_any_splits(scale: int) -> None:
    rank, size = hora.rank(), hora.size()
    table = [[scale * ((3 * source + target) % 4) for target in range(size)] for source in range(size)]
    sent = torch.cat([torch.full((count,), 10 * rank + target) for target, count in enumerate(table[rank])])
    received = [table[source][rank] for source in range(size)]
    output = torch.empty(sum(received), dtype=sent.dtype)
    dist.all_to_all_single(output, sent, received, table[rank])
    expected = [torch.full((count,), 10 * source + rank) for source, count in enumerate(received)]
    assert torch.equal(output, torch.cat(expected))


@ranks(2, 3, 4)
def test_subgroups_and_messages() -> None:
    rank, size = hora.rank(), hora.size()
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=pair)
        assert tensor == size - 1
    right, left = (rank + 1) % size, (rank - 1) % size
    token = torch.tensor([rank])
    received = torch.empty_like(token)
    works = [dist.isend(token, right), dist.irecv(received, left)]
    for work in works:
        work.wait()
    assert received.item() == left
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    dist.barrier()


# --- vectors that live in the engine --------------------------------------------------------------


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vectors_in_the_engine(dtype: torch.dtype) -> None:
    rank, size = hora.rank(), hora.size()
    count = SLOT // 2 + 1000
    vector = group().empty(count + 64, dtype)
    vector[:count] = values(rank, count, dtype)
    vector[count:] = rank
    dist.all_reduce(vector[:count])
    assert torch.equal(vector[:count].double(), everyone(count, dtype).sum(0))
    assert vector[count:].tolist() == [rank] * 64
    assert_same_everywhere(vector[:count])
    share = count // size // 64 * 64
    vector[: share * size] = values(rank, share * size, dtype, salt=1)
    output = torch.empty(share, dtype=dtype)
    dist.reduce_scatter_single(output, vector[: share * size])
    expected = everyone(share * size, dtype, salt=1).sum(0).view(size, share)
    assert torch.equal(output.double(), expected[rank])
    own = vector[rank * share : (rank + 1) * share]
    own.copy_(output)
    dist.all_gather_single(vector[: share * size], own)
    assert torch.equal(vector[: share * size].double(), expected.flatten())


@ranks(2)
def test_memory_that_lies_there_on_one_rank_only() -> None:
    count = SLOT
    vector = group().empty(count, torch.float32)
    tensor = vector if hora.rank() == 0 else torch.empty(count)
    tensor.fill_(hora.rank() + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((count,), 3.0))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hora")


@ranks(2)
def test_memory_is_given_back() -> None:
    before = mapped()
    for _ in range(5):
        vector = group().empty(SLOT, torch.float32)
        part = vector[10:20]
        del vector
        assert part.sum() == 0
        del part
    group().empty(1, torch.float32)  # what is not used any more is forgotten at the next occasion
    assert mapped() <= before + 1


# --- waiting ----------------------------------------------------------------------------------------


@ranks(2, 3)
def test_many_under_way_at_once() -> None:
    tensors = [torch.full((count,), float(hora.rank())) for count in (1, 3000, SLOT, 7, SLOT // 2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(2)
    dist.all_reduce(last)  # after all of them
    assert all(work.is_completed() for work in works)
    for work, tensor in zip(reversed(works), reversed(tensors), strict=True):
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(hora.size()))))


@ranks(2)
def test_what_nobody_waits_for_goes_on() -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((SLOT,), 1.0)
    if hora.rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        store.wait(["done"], timedelta(seconds=10))  # type: ignore[no-untyped-call]
        work.wait()
    else:
        dist.all_reduce(tensor)
        store.set("done", "1")
    assert tensor[0] == 2


@ranks(2)
def test_a_wait_with_a_limit() -> None:
    tensor = torch.ones(4)
    if hora.rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RuntimeError, match="has not ended within 0.05 seconds"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.distributed_c10d._get_default_store().set("limit", "1")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["limit"])
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2] * 4


@ranks(2)
def test_futures() -> None:
    tensor = torch.ones(4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.wait()[0].tolist() == [2] * 4
    with pytest.raises(CollectiveError, match=r"BAND of torch.float32 is not defined"):
        dist.all_reduce(tensor, dist.ReduceOp.BAND)
    dist.all_reduce(tensor)  # that did no harm
    assert tensor.tolist() == [4] * 4


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.alone
@ranks(2, 3)
def test_different_collectives_are_an_error_on_every_rank() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        if hora.rank() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.ones(4))
    assert time.monotonic() - began < 2
    text = str(raised.value)
    assert "rank 0 called all_reduce SUM of 3 elements of float32" in text
    assert "rank 1 called all_reduce SUM of 4 elements of float32" in text
    with pytest.raises(RuntimeError, match="different collectives"):
        dist.barrier()


@pytest.mark.alone
def test_a_killed_rank_is_an_error_on_the_others() -> None:
    def body() -> None:
        dist.barrier()
        if hora.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        for tensor in (torch.ones(3), torch.ones(3)):
            with pytest.raises(dist.DistBackendError, match="Rank 1 has ended"):
                dist.all_reduce(tensor)
        assert time.monotonic() - began < 2
        os._exit(7)

    with pytest.raises(RankFailure) as raised:
        run_ranks(3, body)
    assert "AssertionError" not in str(raised.value)
    assert "did not raise" not in str(raised.value).lower()


@pytest.mark.alone
@pytest.mark.parametrize("when", ["asleep", "about to sleep", "to come"])
def test_whoever_finds_a_killed_rank_tells_the_others(when: str) -> None:
    """They must not find out one after the other, each a slice later; wherever they are just then.

    Rank 0 would look by itself after twenty seconds only; rank 1 finds out, and then says so in the store.
    """

    def body() -> None:
        store, sleep = dist.distributed_c10d._get_default_store(), futex.sleep
        limit = timedelta(seconds=10)

        def observed(*arguments: Any) -> bool:
            if when == "asleep":
                store.set("asleep", "1")
            else:
                store.wait(["found"], limit)
            return sleep(*arguments)

        dist.barrier()
        if hora.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if hora.rank() == 0:
            _team.SLICE = 20.0
            if when == "to come":
                store.wait(["found"], limit)
            else:
                futex.sleep = observed
        elif when == "asleep":
            store.wait(["asleep"], limit)
        with pytest.raises(dist.DistBackendError, match="Rank 2 has ended"):
            dist.barrier()
        now = time.monotonic()
        if hora.rank() == 1:
            store.set("found", str(now))
        else:
            store.wait(["found"], limit)
            assert now - float(store.get("found")) < 1.0

    with pytest.raises(RankFailure) as raised:
        run_ranks(3, body)
    assert str(raised.value) == "--- rank 2\nended without a word"


@pytest.mark.alone
def test_a_rank_that_is_killed_while_it_arrives() -> None:
    """Between the lines of arriving, too."""

    def body() -> None:
        dist.barrier()
        if hora.rank() == 1:
            futex.arrive = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="Rank 1 has ended"):
            dist.barrier()
        assert time.monotonic() - began < 2

    with pytest.raises(RankFailure) as raised:
        run_ranks(3, body)
    assert str(raised.value) == "--- rank 1\nended without a word"


@pytest.mark.alone
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_at_any_moment(seed: int) -> None:
    chance = random.Random(seed)
    size, delay, shared = 2 + seed % 3, chance.uniform(0, 0.1), seed % 2 > 0
    victim, count = chance.randrange(size), chance.choice([1, 1000, 1 << 16, 1 << 20, 1 << 22])

    def body() -> None:
        vector = group().empty(count, torch.float32) if shared else torch.empty(count)
        vector.fill_(1)
        dist.barrier()
        began = time.monotonic()
        if hora.rank() == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(dist.DistBackendError, match=f"Rank {victim} has ended"):
            while True:
                dist.all_reduce(vector, dist.ReduceOp.MAX)
                for work in [dist.all_reduce(vector, dist.ReduceOp.MAX, async_op=True) for _ in range(3)]:
                    work.wait()
                dist.all_gather_single(torch.empty(count * size), vector)
                dist.broadcast(vector, victim)
        assert time.monotonic() - began < delay + 2

    with pytest.raises(RankFailure) as raised:
        run_ranks(size, body)
    assert str(raised.value) == f"--- rank {victim}\nended without a word"


def test_a_rank_that_is_stopped_for_a_while() -> None:
    def body() -> int:
        tensor = torch.ones(SLOT)
        dist.barrier()
        if hora.rank() == 1:
            pid = os.getpid()
            if os.fork() == 0:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(1)  # the time that it stands still
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
        for _ in range(4):
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
        if hora.rank() == 1:
            os.wait()
        return int(tensor[0])

    assert run_ranks(2, body) == [2**8] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def body() -> None:
        if hora.rank() == 0:
            with pytest.raises(RuntimeError, match=r"rank 1 did not come within 0.5 seconds"):
                dist.all_reduce(torch.ones(3))
            dist.distributed_c10d._get_default_store().set("over", "1")
        else:
            dist.distributed_c10d._get_default_store().wait(["over"], timedelta(seconds=10))
        os._exit(0)

    with pytest.raises(RankFailure) as raised:
        run_ranks(2, body, timeout=0.5)
    assert "Error" not in str(raised.value).replace("RankFailure", "")

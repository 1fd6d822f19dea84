"""Operations of Horovod's interface, run by every rank: `hora run --horovod -np N -m pytest THIS_FILE`."""

import itertools
import os
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((), (17,), (5, 4), (3, 1, 2), (0, 3))


@pytest.fixture(autouse=True, scope="module")
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def values(shape, dtype, rank):
    """Small integers, so that every dtype holds every sum exactly."""
    count = int(np.prod(shape))
    return ((torch.arange(count) % 5) + rank).reshape(shape).to(dtype)


def everyone(shape, dtype):
    return [values(shape, torch.float64, rank) for rank in range(hvd.size())]


def test_rank_and_size_are_those_of_the_launcher():
    assert hvd.rank() == int(os.environ["HOROVOD_RANK"])
    assert hvd.size() == int(os.environ["HOROVOD_SIZE"])
    assert hvd.local_rank() == int(os.environ["HOROVOD_LOCAL_RANK"])
    assert hvd.cross_size() == 1
    assert hvd.is_homogeneous()


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_allreduce_sum(dtype):
    for shape in SHAPES:
        total = sum(everyone(shape, dtype))
        tensor = values(shape, dtype, hvd.rank())
        result = hvd.allreduce(tensor, op=hvd.Sum)
        assert result.dtype == dtype
        assert torch.equal(result.double(), total)
        assert torch.equal(tensor, values(shape, dtype, hvd.rank()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_allreduce_average(dtype):
    for shape in SHAPES:
        mean = sum(everyone(shape, dtype)) / hvd.size()
        assert torch.equal(hvd.allreduce(values(shape, dtype, hvd.rank())), mean.to(dtype))


def test_integer_average_truncates():
    assert hvd.allreduce(torch.tensor([hvd.rank(), -hvd.rank()])).tolist() == [
        (hvd.size() - 1) * hvd.size() // 2 // hvd.size(),
        -((hvd.size() - 1) * hvd.size() // 2 // hvd.size()),
    ]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_allreduce_min_max_product(dtype):
    parts = torch.stack(everyone((6,), dtype))
    mine = values((6,), dtype, hvd.rank())
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min).double(), parts.amin(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max).double(), parts.amax(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Product).double(), parts.prod(0))


def test_average_argument_is_deprecated_and_excludes_op():
    forms = (
        hvd.allreduce,
        hvd.allreduce_,
        lambda *args, **kwargs: hvd.grouped_allreduce([*args], **kwargs)[0],
    )
    for form in forms:
        with pytest.warns(DeprecationWarning, match=r"deprecated; write op=hvd\.Sum") as told:
            total = form(torch.ones(2), average=False)
        assert total.tolist() == [hvd.size()] * 2
        assert told[0].filename == __file__
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)


def test_allreduce_in_place():
    for dtype in (torch.int32, torch.float32, torch.float16):
        tensor = values((4, 3), dtype, hvd.rank())
        result = hvd.allreduce_(tensor, op=hvd.Sum)
        assert result is tensor
        assert torch.equal(tensor.double(), sum(everyone((4, 3), dtype)))


def test_non_contiguous_tensors():
    base = values((4, 6), torch.float32, hvd.rank())
    total = sum(everyone((4, 6), torch.float64)).float()
    assert torch.equal(hvd.allreduce(base.t(), op=hvd.Sum), total.t())
    view = base[:, ::2]
    hvd.allreduce_(view, op=hvd.Sum)
    assert torch.equal(base[:, ::2], total[:, ::2])
    assert torch.equal(base[:, 1::2], values((4, 6), torch.float32, hvd.rank())[:, 1::2])


def test_many_asynchronous_operations():
    handles, polled = [], []
    for number in range(60):
        handles.append(hvd.allreduce_async(torch.full((number + 1,), float(number)), op=hvd.Sum))
        polled.append(hvd.poll(handles[-1]))
    for number, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        assert torch.equal(result, torch.full((number + 1,), float(number * hvd.size())))
    assert not all(polled)


def test_poll_turns_true():
    handle = hvd.allreduce_async(torch.ones(3))
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    assert hvd.synchronize(handle) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_scale_factors(dtype):
    tensor = values((7,), dtype, 1) * 3
    exact = tensor.double()
    after = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.7)
    before = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.7)
    if dtype.is_floating_point:
        assert torch.allclose(after.double(), exact * hvd.size() * 0.7, rtol=1e-6)
        assert torch.allclose(before.double(), exact * 0.7 * hvd.size(), rtol=1e-6)
    else:
        assert torch.equal(after, (exact * hvd.size() * 0.7).to(dtype))
        assert torch.equal(before, (exact * 0.7).to(dtype) * hvd.size())


def test_float16_is_rounded_between_the_factor_and_the_sum():
    torch.manual_seed(1234)
    tensor = torch.empty(1000).uniform_(-100, 100).half()
    total = ((tensor.float() * 0.1915194503788923).half().double() * hvd.size()).half()
    factor = {"op": hvd.Sum, "prescale_factor": 0.1915194503788923}
    assert torch.equal(hvd.allreduce(tensor, **factor), total)
    assert torch.equal(hvd.grouped_allreduce([tensor, tensor], **factor)[1], total)
    share = [len(part) for part in total.tensor_split(hvd.size())]
    start = sum(share[: hvd.rank()])
    scattered = hvd.reducescatter(tensor, **factor)
    assert torch.equal(scattered, total[start : start + share[hvd.rank()]])
    handles = [hvd.allreduce_async(tensor, name=f"apart.{number}", **factor) for number in range(8)]
    assert all(torch.equal(hvd.synchronize(handle), total) for handle in handles)


def test_order_of_names_differs_between_ranks():
    names = [f"order.{number}" for number in range(20)]
    mine = names if hvd.rank() == 0 else names[::-1]
    handles = {
        name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), name=name, op=hvd.Sum)
        for name in mine
    }
    for number, name in enumerate(names):
        assert hvd.synchronize(handles[name]).tolist() == [number * hvd.size()] * 3


def test_grouped_allreduce():
    for dtype in (torch.int64, torch.float32):
        tensors = [values((size,), dtype, hvd.rank()) for size in (1, 5, 0, 3)]
        expected = [sum(everyone((size,), dtype)) for size in (1, 5, 0, 3)]
        for result, exact in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), expected, strict=True):
            assert torch.equal(result.double(), exact)
        handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum)
        assert [tensor.shape for tensor in hvd.synchronize(handle)] == [tensor.shape for tensor in tensors]
        results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
        for tensor, exact in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.double(), exact)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS])
def test_allgather(dtype):
    for shape in ((), (4,), (2, 3)):
        mine = (torch.ones((3, *shape)) * (hvd.rank() + 1)).to(dtype)
        gathered = hvd.allgather(mine)
        assert gathered.dtype == dtype
        assert list(gathered.shape) == [3 * hvd.size(), *shape]
        for rank in range(hvd.size()):
            assert bool((gathered[3 * rank : 3 * rank + 3] == torch.tensor(rank + 1).to(dtype)).all())


def test_allgather_of_uneven_and_empty_first_dimensions():
    rows = [rank * 2 for rank in range(hvd.size())]
    gathered = hvd.allgather(torch.full((rows[hvd.rank()], 3), float(hvd.rank())))
    parts = gathered.split(rows)
    assert all(bool((part == rank).all()) for rank, part in enumerate(parts))
    assert gathered.shape[0] == sum(rows)
    first, second = hvd.grouped_allgather([torch.full((hvd.rank() + 1,), 2.0), torch.zeros(1, 2)])
    assert first.shape[0] == sum(range(1, hvd.size() + 1))
    assert second.shape == (hvd.size(), 2)
    handle = hvd.allgather_async(torch.tensor([hvd.rank()]))
    assert hvd.synchronize(handle).tolist() == list(range(hvd.size()))


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS])
def test_broadcast(dtype):
    for root, shape in itertools.product(range(hvd.size()), ((), (17,), (3, 4))):
        mine = (torch.ones(shape) * (hvd.rank() + 1)).to(dtype)
        theirs = (torch.ones(shape) * (root + 1)).to(dtype)
        assert torch.equal(hvd.broadcast(mine, root), theirs)
        assert torch.equal(mine, (torch.ones(shape) * (hvd.rank() + 1)).to(dtype))
        assert hvd.broadcast_(mine, root_rank=root) is mine
        assert torch.equal(mine, theirs)
    handles = [hvd.broadcast_async(torch.tensor([float(hvd.rank())]), 1) for _ in range(5)]
    assert [hvd.synchronize(handle).item() for handle in handles] == [1.0] * 5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.float64])
def test_alltoall(dtype):
    size, rank = hvd.size(), hvd.rank()
    tensor = torch.arange(size).repeat_interleave(rank + 1).reshape(-1, 1).repeat(1, 2).to(dtype)
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    collected, received = hvd.alltoall(tensor, splits)
    assert bool((collected == rank).all())
    assert list(collected.shape) == [sum(range(1, size + 1)), 2]
    assert received.tolist() == list(range(1, size + 1))
    even = hvd.alltoall(torch.arange(size * 2) // 2 + 10 * rank)
    assert even.tolist() == [10 * other + rank for other in range(size) for _ in range(2)]


def test_alltoall_with_nothing_for_some():
    size, rank = hvd.size(), hvd.rank()
    splits = [0] * size
    if rank == 0:
        splits[1] = 3
    collected, received = hvd.alltoall(torch.ones(sum(splits), 2), torch.tensor(splits, dtype=torch.int32))
    assert collected.shape[0] == (3 if rank == 1 else 0)
    assert received.tolist() == [3 if rank == 1 and other == 0 else 0 for other in range(size)]


def test_alltoall_splits_are_checked():
    with pytest.raises(ValueError):
        hvd.alltoall(torch.ones(2), torch.tensor([100] * hvd.size(), dtype=torch.int32))
    with pytest.raises(ValueError):
        hvd.alltoall(torch.ones(hvd.size() + 1))
    with pytest.raises(ValueError):
        hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size(), dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_reducescatter(dtype):
    size, rank = hvd.size(), hvd.rank()
    for rows in (4 * size, 4 * size + 1, 1, 0):
        tensor = values((rows, 3), dtype, rank)
        own = [rows // size + (other < rows % size) for other in range(size)]
        exact = sum(everyone((rows, 3), dtype)).split(own)[rank]
        result = hvd.reducescatter(tensor, op=hvd.Sum)
        assert result.dtype == dtype
        assert torch.equal(result.double(), exact)
    if dtype.is_floating_point:
        tensor = values((size * 2,), dtype, rank)
        mean = (sum(everyone((size * 2,), dtype)) / size).to(dtype).split(2)[rank]
        assert torch.equal(hvd.reducescatter(tensor), mean)
        handle = hvd.grouped_reducescatter_async([tensor, tensor * 2], op=hvd.Average)
        first, second = hvd.synchronize(handle)
        assert torch.equal(first, mean)
        assert torch.equal(second, mean * 2)


def test_objects():
    assert hvd.broadcast_object({"lr": 0.1, "who": hvd.rank()}, root_rank=0) == {"lr": 0.1, "who": 0}
    assert hvd.broadcast_object(hvd.rank(), root_rank=1, name="object") == 1
    gathered = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()})
    assert gathered == [{"rank": rank, "text": "x" * rank} for rank in range(hvd.size())]


def test_compression():
    for dtype in (torch.float32, torch.float64):
        tensor = torch.randn(7, dtype=dtype)
        packed, context = hvd.Compression.fp16.compress(tensor)
        assert packed.dtype == torch.float16
        restored = hvd.Compression.fp16.decompress(packed, context)
        assert restored.dtype == dtype
        assert torch.allclose(restored, tensor, rtol=1e-3, atol=1e-3)
    whole = torch.arange(3)
    packed, context = hvd.Compression.fp16.compress(whole)
    assert packed.dtype == torch.int64
    result = hvd.allreduce(torch.full((4,), 0.5), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert result.dtype == torch.float32
    assert result.tolist() == [0.5 * hvd.size()] * 4


def test_sparse_allreduce():
    indices = torch.tensor([[0, hvd.rank() + 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([[1.0, 1.0], [2.0, 2.0]]), (hvd.size() + 2, 2))
    handle = hvd.sparse_allreduce_async(tensor, name="sparse", op=hvd.Average)
    dense = handle().to_dense()
    assert dense[0].tolist() == [1.0, 1.0]
    assert torch.allclose(dense[1 : hvd.size() + 1], torch.tensor(2.0 / hvd.size()))


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients(dtype):
    size, rank = hvd.size(), hvd.rank()

    def leaf(*shape):
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    x = leaf(5)
    hvd.allreduce(x, op=hvd.Sum).backward(torch.ones(5, dtype=dtype))
    assert x.grad.tolist() == [float(size)] * 5
    x = leaf(5)
    hvd.allreduce(x, op=hvd.Average).backward(torch.ones(5, dtype=dtype))
    assert x.grad.tolist() == [1.0] * 5
    x, y = leaf(2), leaf(3)
    results = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    (results[0].sum() + 2 * results[1].sum()).backward()
    assert x.grad.tolist() == [float(size)] * 2
    assert y.grad.tolist() == [2.0 * size] * 3
    # Gathered rows: the mean of what the ranks say about them.
    x = leaf(rank + 1, 2)
    weights = torch.cat([torch.full((other + 1, 2), float(other), dtype=dtype) for other in range(size)])
    hvd.allgather(x).backward(weights)
    assert bool((x.grad == rank).all())
    for root in range(size):
        x = leaf(4)
        hvd.broadcast(x, root).backward(torch.ones(4, dtype=dtype))
        assert x.grad.tolist() == [1.0 if rank == root else 0.0] * 4
    x = leaf(size * (rank + 1))
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    collected, _ = hvd.alltoall(x, splits)
    collected.backward(torch.full(collected.shape, float(rank), dtype=dtype))
    assert x.grad.tolist() == [float(other) for other in range(size) for _ in range(rank + 1)]
    x = leaf(size * 2)
    hvd.reducescatter(x, op=hvd.Sum).backward(torch.ones(2, dtype=dtype))
    assert x.grad.tolist() == [float(size)] * (2 * size)
    x = leaf(size * 2)
    hvd.reducescatter(x, op=hvd.Average).backward(torch.ones(2, dtype=dtype))
    assert x.grad.tolist() == [1.0] * (2 * size)


# --- errors -------------------------------------------------------------------------------------


def refuses(call, *texts):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    assert all(text in str(caught.value) for text in texts)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # the job goes on


def test_mismatches_are_told_on_every_rank():
    rank = hvd.rank()
    refuses(lambda: hvd.allreduce(torch.ones(17 + rank)), "Mismatched allreduce tensor shapes")
    refuses(
        lambda: hvd.allreduce(torch.ones(4, 6) if rank else torch.ones(24)),
        "Mismatched allreduce tensor shapes",
    )
    kind = torch.int32 if rank % 2 else torch.float32
    refuses(lambda: hvd.allreduce(torch.ones(3, dtype=kind)), "Mismatched data types")
    refuses(
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if rank else hvd.Average), "Mismatched", "operations"
    )
    refuses(lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank), "Mismatched", "factors")
    refuses(lambda: hvd.broadcast(torch.ones(3), root_rank=min(rank, 1)), "Mismatched broadcast root ranks")
    refuses(lambda: hvd.broadcast(torch.ones(3 + rank), root_rank=0), "Mismatched broadcast tensor shapes")
    refuses(lambda: hvd.allgather(torch.ones(2, 3 + rank)), "Mismatched allgather tensor shapes")
    refuses(lambda: hvd.allgather(torch.ones(2, dtype=kind)), "Mismatched data types")
    refuses(lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions")
    refuses(
        lambda: hvd.alltoall(torch.ones(hvd.size(), 2 + rank)),
        "Mismatched alltoall tensor shapes",
    )
    refuses(lambda: hvd.reducescatter(torch.ones(6, 2 + rank)), "Mismatched reducescatter tensor shapes")
    refuses(lambda: hvd.reducescatter(torch.tensor(2.0)), "no dimensions")
    refuses(
        lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + min(rank, 1))), "Mismatched number of tensors"
    )
    refuses(
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(2 + rank)]),
        "Mismatched allreduce tensor shapes",
    )


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast"])
def test_duplicate_names(kind):
    start = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(3), name="twice"),
        "allgather": lambda: hvd.allgather_async(torch.ones(3), name="twice"),
        "broadcast": lambda: hvd.broadcast_async(torch.ones(3), 0, name="twice"),
    }[kind]
    # Only one rank asks, so the operation stays under way whatever the timing, and a barrier passes it.
    first = None
    if hvd.rank() == 0:
        first = start()
        with pytest.raises(ValueError, match="[Dd]uplicate"):
            start()
    hvd.barrier()
    if hvd.rank() == 0:
        assert not hvd.poll(first)
    hvd.barrier()
    if hvd.rank() > 0:
        first = start()
    hvd.synchronize(first)


def test_a_name_is_held_until_this_rank_has_waited():
    """However fast the first operation ends: the last rank to ask finds all others waiting."""
    for number in range(30):
        if hvd.rank() > 0:
            hvd.allreduce_async(torch.ones(1), name=f"held.{number}")
        hvd.barrier()
        if hvd.rank() == 0:
            first = hvd.allreduce_async(torch.ones(1), name=f"held.{number}")
            with pytest.raises(ValueError, match="Duplicate"):
                hvd.allreduce_async(torch.ones(1), name=f"held.{number}")
            while not hvd.poll(first):
                pass
        hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(1), name="again")
    while not hvd.poll(handle):
        pass
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="again"))


def test_numbers_for_operations_and_roots():
    assert hvd.allreduce(torch.ones(1), op=1).item() == hvd.size()
    assert hvd.allreduce(torch.tensor(float(hvd.rank())), op=4).item() == hvd.size() - 1
    assert hvd.broadcast(torch.tensor(hvd.rank()), np.int64(1)).item() == 1
    assert hvd.broadcast_object(hvd.rank(), root_rank=np.int32(1)) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError):
        hvd.broadcast(torch.ones(1), root_rank=hvd.size())
    with pytest.raises((ValueError, TypeError)):
        hvd.allreduce([1.0, 2.0])


# --- process sets -------------------------------------------------------------------------------


def test_process_sets():
    size, rank = hvd.size(), hvd.rank()
    even = hvd.add_process_set([other for other in range(size) if other % 2 == 0])
    odd = hvd.add_process_set(hvd.ProcessSet([other for other in range(size) if other % 2]))
    mine, others = (even, odd) if rank % 2 == 0 else (odd, even)
    assert mine.included()
    assert not others.included()
    assert others.rank() is None
    assert mine.size() == len(mine.ranks)
    assert mine.ranks[mine.rank()] == rank
    assert hvd.process_set_included(mine.process_set_id)
    assert not hvd.process_set_included(others.process_set_id)
    assert hvd.get_process_set_ids_and_ranks()[mine.process_set_id] == mine.ranks
    total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
    assert total.item() == sum(mine.ranks)
    mean = hvd.allreduce(torch.tensor([float(rank)]), process_set=mine)
    assert mean.item() == sum(mine.ranks) / len(mine.ranks)
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    assert hvd.broadcast(torch.tensor([rank]), mine.ranks[-1], process_set=mine).item() == mine.ranks[-1]
    assert hvd.alltoall(torch.full((mine.size(),), rank), process_set=mine).tolist() == mine.ranks
    assert (
        hvd.reducescatter(torch.full((mine.size(),), 1.0), op=hvd.Sum, process_set=mine).item() == mine.size()
    )
    assert hvd.broadcast_object(rank, mine.ranks[0], process_set=mine) == mine.ranks[0]
    hvd.barrier(process_set=mine)
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, process_set=mine).sum().backward()
    assert x.grad.tolist() == [float(mine.size())] * 3
    with pytest.raises((ValueError, hvd.HorovodInternalError)):
        hvd.allreduce(torch.ones(1), process_set=others)
    if others.ranks:
        with pytest.raises((ValueError, hvd.HorovodInternalError)):
            hvd.broadcast(torch.ones(1), others.ranks[0], process_set=mine)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.get_process_set_ids_and_ranks() == {0: list(range(size))}
    with pytest.raises((ValueError, hvd.HorovodInternalError)):
        hvd.allreduce(torch.ones(1), process_set=even)


def test_process_sets_that_cannot_be():
    with pytest.raises(ValueError):
        hvd.add_process_set(range(hvd.size()))
    with pytest.raises(ValueError):
        hvd.add_process_set([hvd.size()])
    pair = hvd.add_process_set([0])
    with pytest.raises(ValueError):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(pair)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.add_process_set([min(hvd.rank(), 1)])


# --- join ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_join_allreduce(first):
    size = hvd.size()
    for dtype in (torch.float32, torch.float64):
        hvd.barrier()
        if hvd.rank() == first:
            last = hvd.join()
        else:
            for shape in ((3,), (2, 2)):
                mean = hvd.allreduce(torch.ones(shape, dtype=dtype), name="joined")
                assert torch.allclose(mean, torch.full(shape, (size - 1) / size, dtype=dtype))
            grouped = hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], op=hvd.Sum)
            assert grouped[1].item() == size - 1
            last = hvd.join()
        assert last != first
        assert hvd.allreduce(torch.tensor([last])).item() == last


def test_join_refuses_what_it_cannot_do():
    if hvd.rank() == 0:
        last = hvd.join()
    else:
        time.sleep(0.05)
        for call in (
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.alltoall(torch.ones(hvd.size())),
            lambda: hvd.reducescatter(torch.ones(hvd.size())),
        ):
            with pytest.raises(hvd.HorovodInternalError, match="join"):
                call()
        last = hvd.join()
    assert last != 0


# --- the rest -----------------------------------------------------------------------------------


def test_an_operation_that_one_rank_lacks_holds_nobody_up():
    handle = hvd.allreduce_async(torch.ones(2), name="late") if hvd.rank() == 0 else None
    for _ in range(3):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.barrier()
    if hvd.rank() == 0:
        assert not hvd.poll(handle)
    hvd.barrier()
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(torch.ones(2), name="late")
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]


def test_timeline(tmp_path):
    import json

    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="traced")
    time.sleep(0.05)
    if hvd.rank() == 0:
        assert "NEGOTIATE_ALLREDUCE" in path.read_text()  # while it is being written
    hvd.stop_timeline()
    if hvd.rank() == 0:
        text = path.read_text()
        assert isinstance(json.loads(text), list)
        for word in ("allreduce.traced", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"):
            assert word in text


def test_queries():
    assert hvd.gloo_enabled()
    assert hvd.gloo_built()
    assert not hvd.mpi_enabled()
    assert not hvd.mpi_built()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert not hvd.rocm_built()


def test_init_is_idempotent_and_may_be_repeated():
    hvd.init()
    for _ in range(5):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError):
            hvd.rank()
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert hvd.remove_process_set(hvd.add_process_set([0]))  # sets were dynamic before
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, hvd.size()))]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    assert [found.process_set_id for found in sets] == [1, 2]
    mine = sets[min(hvd.rank(), 1)]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    hvd.shutdown()
    with pytest.raises(ValueError):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    hvd.init(process_sets="dynamic")

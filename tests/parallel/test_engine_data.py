"""The shared-memory engine against references: random calls, memory that overlaps, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.torch.engines import LARGE
from hora.torch.engines._team import SLOT

MOVED = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int64,
]
OPERATIONS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
COUNTS = [0, 1, 2, 31, 1000, LARGE // 8, LARGE // 8 + 1, SLOT // 16 + 5, SLOT // 2 + 3]


def group() -> Any:
    return dist.group.WORLD


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Ones and twos: what comes of them, over five ranks, is exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(1, 3, (count,), generator=generator).to(dtype)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def reduced(rows: torch.Tensor, op: Any) -> torch.Tensor:
    """The rows' reduction, of numbers that all dtypes tell apart."""
    if op == dist.ReduceOp.SUM:
        return rows.sum(0)
    if op == dist.ReduceOp.PRODUCT:
        return rows.prod(0)
    return rows.real.amin(0) if op == dist.ReduceOp.MIN else rows.real.amax(0)


class Memory:
    """Makes tensors with given contents: contiguous, with gaps, with another order, or in a buffer."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._buffer = group().empty(5 * (SLOT // 2 + 3) * 16 + 4096, torch.uint8)

    def __call__(self, values: torch.Tensor, *, contiguous: bool = False) -> torch.Tensor:
        kind = self._chance.choice(
            ["plain", "buffer"] if contiguous else ["plain", "gaps", "turned", "buffer"]
        )
        count = values.numel()
        if kind == "buffer":
            offset = self._chance.choice([0, 16, 64, 1008])
            place = self._buffer[offset : offset + values.nbytes].view(values.dtype)
        elif kind == "gaps":
            place = torch.empty(2 * count, dtype=values.dtype)[::2]
        elif kind == "turned" and count % 2 == 0:
            place = torch.empty(2, count // 2, dtype=values.dtype).t()
            values = values.view(count // 2, 2)
        else:
            place = torch.empty(count, dtype=values.dtype)
        return place.copy_(values)


@ranks(1, 2, 3, 5)
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int) -> None:
    chance = random.Random(seed)  # the same on all ranks
    memory, rank, size = Memory(chance), hora.rank(), hora.size()
    for round_ in range(12):
        salt, count = 50 * seed + round_, chance.choice(COUNTS)
        dtype, op = chance.choice(MOVED), chance.choice(OPERATIONS)
        root, asynchronous = chance.randrange(size), chance.random() < 0.4
        kind = chance.choice(
            ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"]
        )
        if "reduce" in kind and (dtype is torch.bool or (dtype.is_complex and op != dist.ReduceOp.SUM)):
            dtype = torch.float32
        everyone = [numbers(salt, each, count, dtype) for each in range(size)]
        rows = torch.stack([exact(each) for each in everyone])
        mine, expected, result = everyone[rank], rows, None
        if kind in ("all_reduce", "reduce"):
            tensor = memory(mine)
            work = (
                dist.all_reduce(tensor, op, async_op=asynchronous)
                if kind == "all_reduce"
                else dist.reduce(tensor, root, op, async_op=asynchronous)
            )
            done = kind == "all_reduce" or rank == root
            expected, result = reduced(rows, op) if done else exact(mine), tensor
        elif kind == "broadcast":
            result = memory(mine)
            work, expected = dist.broadcast(result, root, async_op=asynchronous), rows[root]
        elif kind in ("all_gather", "gather"):
            outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            if kind == "all_gather":
                work = dist.all_gather(outputs, memory(mine, contiguous=True), async_op=asynchronous)
            else:
                work = dist.gather(mine, outputs if rank == root else None, root, async_op=asynchronous)
        elif kind == "scatter":
            result = memory(torch.zeros(count, dtype=dtype))
            inputs = everyone if rank == root else None
            work, expected = dist.scatter(result, inputs, root, async_op=asynchronous), rows[rank]
        else:
            whole = memory(torch.cat([mine.roll(part) for part in range(size)]), contiguous=True)
            result = torch.empty(count, dtype=dtype)
            work = dist.reduce_scatter_single(result, whole, op, async_op=asynchronous)
            expected = reduced(torch.stack([row.roll(rank) for row in rows]), op)
        if work is not None:
            work.wait()
        if kind == "all_gather" or (kind == "gather" and rank == root):
            result = torch.stack(outputs)
        if result is not None:
            assert torch.equal(exact(result).reshape(expected.shape), expected.to(exact(result).dtype)), (
                kind,
                dtype,
                op,
                count,
            )


# --- memory that overlaps -------------------------------------------------------------------------


@ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("place", ["own", "first", "last", "between"])
@pytest.mark.parametrize("shared", [False, True])
def test_reduce_scatter_into_its_input(place: str, shared: bool) -> None:
    rank, size, count = hora.rank(), hora.size(), SLOT // 8 + 64
    whole = group().empty(size * count, torch.float32) if shared else torch.empty(size * count)
    whole.copy_(torch.cat([numbers(rank, part, count, torch.float32) for part in range(size)]))
    start = {"own": rank * count, "first": 0, "last": (size - 1) * count, "between": (size - 1) * count // 2}[
        place
    ]
    output = whole[start : start + count]
    dist.reduce_scatter_single(output, whole)
    expected = sum(numbers(each, rank, count, torch.float64) for each in range(size))
    assert torch.equal(output.double(), expected)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("place", ["own", "first", "last", "between"])
@pytest.mark.parametrize("shared", [False, True])
def test_all_gather_of_a_part_of_its_output(place: str, shared: bool) -> None:
    rank, size, count = hora.rank(), hora.size(), SLOT // 4 + 64
    whole = group().empty(size * count, torch.float32) if shared else torch.empty(size * count)
    start = {"own": rank * count, "first": 0, "last": (size - 1) * count, "between": (size - 1) * count // 2}[
        place
    ]
    part = whole[start : start + count].copy_(numbers(1, rank, count, torch.float32))
    dist.all_gather_single(whole, part)
    assert torch.equal(
        whole.view(size, count), torch.stack([numbers(1, r, count, torch.float32) for r in range(size)])
    )


@ranks(2, 3)
def test_all_to_all_within_one_tensor() -> None:
    rank, size, count = hora.rank(), hora.size(), SLOT // 4
    tensor = torch.cat([torch.full((count,), 10.0 * rank + part) for part in range(size)])
    dist.all_to_all_single(tensor, tensor)
    assert torch.equal(
        tensor.view(size, count)[:, 7], torch.tensor([10.0 * part + rank for part in range(size)])
    )


# --- what is refused --------------------------------------------------------------------------------


@ranks(2)
def test_refused_before_it_begins() -> None:
    one, size = torch.ones(3), hora.size()
    for call, words in (
        (
            lambda: dist.reduce_scatter(one, [torch.ones(3 + i) for i in range(size)]),
            "tensor for rank 1 has 4 elements",
        ),
        (lambda: dist.all_gather([one, torch.ones(4)], one), "tensor for rank 1 has 4 elements"),
        (lambda: dist.all_gather_single(torch.ones(7), one), "7 elements are not 2 times 3"),
        (lambda: dist.reduce_scatter_single(one, torch.ones(7)), "7 elements are not 2 times 3"),
        (lambda: dist.reduce_scatter(one, [one]), "list of 1 tensors"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "cannot split a tensor of shape"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]), r"as \[1, 1\]"),
        (lambda: dist.all_to_all([one, one], [one.int(), one.int()]), "float32|dtype"),
        (lambda: dist.all_reduce(torch.ones(1).expand(4)), "share one place in memory"),
        (lambda: dist.broadcast(torch.ones(1).expand(4), 0), "share one place in memory"),
    ):
        with pytest.raises((CollectiveError, ValueError), match=words):
            call()  # type: ignore[no-untyped-call]
    dist.all_reduce(one)
    assert one.tolist() == [2, 2, 2]


@ranks(2, 3)
def test_all_to_all_whose_splits_do_not_match() -> None:
    size = hora.size()
    received = [1] * size
    received[0] = 2 if hora.rank() == 1 else 1
    output = torch.zeros(sum(received), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="rank 0 sends 8 bytes to rank 1, which expects 16"):
        dist.all_to_all_single(output, torch.ones(size, dtype=torch.int64), received, [1] * size)


# --- what a script has switched on ------------------------------------------------------------------


@ranks(2)
def test_modes_of_the_script_do_not_reach_the_engine() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations.append(str(function))
            return function(*args, **(kwargs or {}))

    def use() -> None:
        for count in (3, SLOT):
            tensor = torch.ones(count, device="cpu", dtype=torch.float32)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            assert tensor[0].item() == 4
        whole = torch.empty(6, device="cpu", dtype=torch.float32)
        dist.all_gather_single(whole, tensor[:3])
        vector = group().empty(SLOT, torch.float32).fill_(1)
        dist.all_reduce(vector)
        assert vector[0].item() == 2
        dist.all_to_all_single(torch.empty_like(whole), whole)

    with Seen() as seen:
        use()
    assert not [name for name in seen.operations if name.startswith(("aten.add", "aten.split"))]
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu"):
            use()
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@ranks(2)
def test_inference_tensors_with_gaps() -> None:
    with torch.inference_mode():
        turned, whole = torch.ones(4, 6).t(), torch.empty(2 * 3)
        works = [
            dist.all_reduce(turned, async_op=True),
            dist.all_gather_single(whole, torch.ones(3), async_op=True),
        ]
        dist.broadcast(turned, 0)
    for work in works:
        work.wait()
    assert (turned[0, 0].item(), whole.tolist()) == (2, [1] * 6)

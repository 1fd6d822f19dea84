"""Every operation, on tensors of every kind, against what one process computes in float64."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.torch import _adasum

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.bool, torch.complex64, torch.complex128]
FOLD: dict[hora.ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    hora.Average: torch.add,
    hora.Sum: torch.add,
    hora.Min: torch.minimum,
    hora.Max: torch.maximum,
    hora.Product: torch.mul,
}

# Hypothesis draws many cases for each start of the ranks; nothing is shrunk, as a fork costs more.
few = settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    op: hora.ReduceOp
    prescale: float
    postscale: float
    seed: int

    def tensor(self, rank: int, *, rows: int | None = None) -> torch.Tensor:
        """What ``rank`` contributes; every rank can compute every other rank's part."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = list(self.shape)
        if rows is not None and shape:
            shape[0] = rows
        if self.layout == "strided" and shape:
            shape[-1] = 2 * shape[-1] + 1
        if self.layout == "transposed":
            shape.reverse()
        if self.dtype is torch.bool:
            made = torch.randint(0, 2, shape, generator=generator).bool()
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            wide = torch.complex128 if self.dtype.is_complex else torch.float64
            made = torch.randn(shape, generator=generator, dtype=wide).to(self.dtype)
        else:
            made = torch.randint(0, 120, shape, generator=generator).to(self.dtype)
        if self.layout == "strided" and shape:
            made = made[..., :-1:2]
        if self.layout == "transposed":
            made = made.permute(list(range(made.dim() - 1, -1, -1)))
        return made

    def tensors(self, size: int) -> list[torch.Tensor]:
        return [self.tensor(rank) for rank in range(size)]

    def reduced(self, given: list[torch.Tensor]) -> torch.Tensor:
        """The reference: float64 for floats, exact for integers."""
        if self.dtype.is_floating_point:
            scaled = [tensor.double() * self.prescale for tensor in given]
            total = functools.reduce(FOLD[self.op], scaled)
            return (total / len(given) if self.op is hora.Average else total) * self.postscale
        wide = torch.int32 if self.dtype is torch.int16 else self.dtype
        scaled = [scale_integer(tensor.to(wide), self.prescale) for tensor in given]
        return scale_integer(functools.reduce(FOLD[self.op], scaled), self.postscale).to(self.dtype)

    def check(self, result: torch.Tensor, exact: torch.Tensor, size: int) -> None:
        assert result.dtype == self.dtype, self
        assert result.shape == exact.shape, self
        if not self.dtype.is_floating_point:
            assert torch.equal(result, exact), self
            return
        eps = torch.finfo(self.dtype).eps
        half = self.dtype in (torch.float16, torch.bfloat16)
        # Half precision: one rounding of what float32 says. Wider: the additions' own errors, which are
        # relative to the terms (of up to 6, scaled), and of products to the result.
        terms = 6 * size * max(self.prescale, 1) * max(self.postscale, 1)
        own = torch.finfo(torch.float32).eps if half else eps
        bound = (eps * exact.abs() if half else 0) + own * (4 * terms + 4 * size * exact.abs()) + 1e-7 * half
        assert bool(((result.double() - exact).abs() <= bound).all()), self


def scale_integer(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else (tensor.double() * factor).to(tensor.dtype)


def cases(dtypes: list[torch.dtype], ops: list[hora.ReduceOp]) -> st.SearchStrategy[list[Case]]:
    size = st.sampled_from([0, 1, 2, 3, 5, 17])
    shape = st.lists(size, max_size=3).map(tuple)
    factor = st.sampled_from([1.0, 1.0, 0.5, 0.3, 2.0])
    case = st.builds(
        Case,
        dtype=st.sampled_from(dtypes),
        shape=shape,
        layout=st.sampled_from(["plain", "strided", "transposed"]),
        op=st.sampled_from(ops),
        prescale=factor,
        postscale=factor,
        seed=st.integers(0, 10**6),
    )
    return st.lists(case, min_size=25, max_size=25)


def scales(case: Case) -> dict[str, Any]:
    return {"op": case.op, "prescale_factor": case.prescale, "postscale_factor": case.postscale}


def sensible(case: Case) -> bool:
    return case.dtype.is_floating_point or (case.op is not hora.Average and case.prescale >= 0.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@few
@given(drawn=cases(INTEGERS + FLOATS, list(FOLD)))
def test_reductions(size: int, drawn: list[Case]) -> None:
    run_ranks(size, check_reductions, [case for case in drawn if sensible(case)])


def check_reductions(drawn: list[Case]) -> None:
    size, rank = hora.size(), hora.rank()
    started = []
    for number, case in enumerate(drawn):
        given = case.tensors(size)
        mine, exact = given[rank], case.reduced(given)
        kept = mine.clone()
        case.check(hora.allreduce(mine, **scales(case)), exact, size)
        assert torch.equal(mine, kept)
        started.append((case, exact, hora.allreduce_async(mine, name=f"case {number}", **scales(case))))
        assert hora.allreduce_(mine, **scales(case)) is mine
        case.check(mine, exact, size)
        if case.shape:
            result = hora.reducescatter(case.tensor(rank), **scales(case))
            rows = case.shape[0]
            sizes = [rows // size + (place < rows % size) for place in range(size)]
            case.check(result, torch.split(exact, sizes)[rank], size)
    for case, exact, handle in started:
        case.check(hora.synchronize(handle), exact, size)


@pytest.mark.parametrize("size", [1, 2, 3])
@few
@given(drawn=cases(INTEGERS + FLOATS, list(FOLD)))
def test_groups(size: int, drawn: list[Case]) -> None:
    run_ranks(size, check_groups, [case for case in drawn if sensible(case)])


def check_groups(drawn: list[Case]) -> None:
    size, rank = hora.size(), hora.rank()
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in drawn:
        groups.setdefault((case.op, case.prescale, case.postscale), []).append(case)
    for members in groups.values():
        options = scales(members[0])
        exact = [case.reduced(case.tensors(size)) for case in members]
        mine = [case.tensor(rank) for case in members]
        for results in (
            hora.grouped_allreduce(mine, **options),
            hora.synchronize(hora.grouped_allreduce_async(mine, **options)),
            hora.synchronize(hora.grouped_allreduce_async_([tensor.clone() for tensor in mine], **options)),
            hora.grouped_allreduce_(mine, **options),
        ):
            for case, result, expected in zip(members, results, exact, strict=True):
                case.check(result, expected, size)
        with_rows = [case for case in members if case.shape]
        if with_rows:
            results = hora.grouped_reducescatter([case.tensor(rank) for case in with_rows], **options)
            for case, result in zip(with_rows, results, strict=True):
                rows = case.shape[0]
                sizes = [rows // size + (place < rows % size) for place in range(size)]
                whole = case.reduced(case.tensors(size))
                case.check(result, torch.split(whole, sizes)[rank], size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@few
@given(drawn=cases(INTEGERS + FLOATS + OTHERS, [hora.Sum]))
def test_exchanges(size: int, drawn: list[Case]) -> None:
    run_ranks(size, check_exchanges, drawn)


def check_exchanges(drawn: list[Case]) -> None:
    size, rank = hora.size(), hora.rank()
    uneven, expected = [], []
    for case in drawn:
        given = case.tensors(size)
        root = case.seed % size
        assert torch.equal(hora.broadcast(given[rank], root), given[root]), case
        handle = hora.broadcast_async_(given[rank], root, name="in place")
        result = hora.synchronize(handle)
        assert result is given[rank]
        assert torch.equal(result, given[root]), case
        rows = [(case.seed >> place) % 4 for place in range(size)]
        parts = [case.tensor(other, rows=rows[other]) for other in range(size)]
        whole = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
        assert torch.equal(hora.allgather(parts[rank]), whole), case
        uneven.append(parts[rank])
        expected.append(whole)
        if case.shape:
            # splits[sender][receiver]
            splits = [[(case.seed + 3 * a + b) % 3 for b in range(size)] for a in range(size)]
            sent = [case.tensor(a, rows=sum(splits[a])) for a in range(size)]
            wanted = torch.cat([torch.split(sent[a], splits[a])[rank] for a in range(size)])
            output, received = hora.alltoall(sent[rank], splits=torch.tensor(splits[rank]))
            assert torch.equal(output, wanted), case
            assert received.dtype == torch.int32
            assert received.tolist() == [row[rank] for row in splits]
            even = [case.tensor(a, rows=2 * size) for a in range(size)]
            wanted = torch.cat([tensor[2 * rank : 2 * rank + 2] for tensor in even])
            assert torch.equal(hora.synchronize(hora.alltoall_async(even[rank])), wanted), case
    for results in (hora.grouped_allgather(uneven), hora.grouped_allgather_async(uneven)()):
        assert all(torch.equal(result, whole) for result, whole in zip(results, expected, strict=True))


@ranks(2, 3)
def test_large_odd_sizes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        case = Case(dtype, (2**20 + 3,), "plain", hora.Sum, 1.0, 1.0, 7)
        given = case.tensors(hora.size())
        case.check(hora.allreduce(given[hora.rank()], op=hora.Sum), case.reduced(given), hora.size())


@ranks(2)
def test_operations_overlap_and_are_taken_once() -> None:
    handles = [hora.allreduce_async(torch.full((1000,), float(i)), op=hora.Sum) for i in range(20)]
    for number, handle in reversed(list(enumerate(handles))):
        assert hora.synchronize(handle)[0] == 2 * number
    assert len(set(handles)) == 20
    with pytest.raises(CollectiveError, match="was taken before"):
        hora.synchronize(handles[0])
    handle = hora.allreduce_async(torch.ones(1))
    while not hora.poll(handle):
        os.sched_yield()
    assert handle() == 1
    assert not hora.context().pending


@ranks(2)
def test_average_is_the_older_word_for_op() -> None:
    ones = torch.ones(2)
    with pytest.warns(DeprecationWarning, match="op=hora.Sum"):
        assert hora.allreduce(ones, average=False).tolist() == [2, 2]
    with pytest.warns(DeprecationWarning, match="op=hora.Average"):
        assert hora.allreduce(ones, True).tolist() == [1, 1]
    with pytest.raises(CollectiveError, match="both average=True and op="):
        hora.allreduce(ones, average=True, op=hora.Sum)
    with pytest.raises(CollectiveError, match="op=hora.Sum"):
        hora.allreduce(ones, hora.Sum)  # type: ignore[arg-type]


@ranks(2)
def test_compression_rounds_what_travels() -> None:
    values = torch.tensor([1.0, 2.0, 1 + 2**-9]) * (hora.rank() + 1)
    for compression, exact in (
        (hora.Compression.fp16, [3, 6, 3 + 3 * 2**-9]),
        (hora.Compression.bf16, [3, 6, 3]),
    ):
        result = hora.allreduce(values, op=hora.Sum, compression=compression)
        assert result.dtype == torch.float32
        assert result.tolist() == exact
    whole = torch.tensor([3])
    assert hora.allreduce(whole, op=hora.Sum, compression=hora.Compression.fp16).tolist() == [6]
    many = hora.grouped_allreduce([values, values.double()], compression=hora.Compression.fp16, op=hora.Sum)
    assert [result.dtype for result in many] == [torch.float32, torch.float64]
    assert hora.reducescatter(values[:2], compression=hora.Compression.fp16).tolist() == [
        1.5 * (hora.rank() + 1)
    ]


def adasum_reference(vectors: list[torch.Tensor]) -> torch.Tensor:
    if len(vectors) == 1:
        return vectors[0]
    middle = len(vectors) // 2
    a, b = adasum_reference(vectors[:middle]), adasum_reference(vectors[middle:])
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


@ranks(1, 2, 4)
def test_adasum_combines_pairs_of_pairs() -> None:
    size, rank = hora.size(), hora.rank()
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2)):
        given = [Case(dtype, (7, 3), "strided", hora.Adasum, 1, 1, 5).tensor(r) for r in range(size)]
        exact = adasum_reference([tensor.double() for tensor in given])
        result = hora.allreduce(given[rank], op=hora.Adasum)
        assert result.dtype == dtype
        assert torch.allclose(result.double(), exact, rtol=bound, atol=bound)
    same = torch.tensor([3.0, 4.0])
    assert torch.equal(hora.allreduce(same, op=hora.Adasum), same)  # equal vectors are averaged
    crossed = torch.eye(4)[rank]
    assert torch.equal(hora.allreduce(crossed, op=hora.Adasum), torch.eye(4)[:size].sum(0))
    pair = hora.grouped_allreduce([same, crossed], op=hora.Adasum)  # each tensor by itself
    assert torch.equal(pair[0], same)
    zero = torch.zeros(2) if rank else same
    assert torch.equal(hora.allreduce(zero, op=hora.Adasum), same)


def test_adasum_of_two_is_symmetric() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    # a.b = 1, |a|^2 = 5, |b|^2 = 10
    expected = a * 0.9 + b * 0.95
    assert torch.allclose(_adasum.combine(a, b), expected)
    assert torch.equal(_adasum.combine(a, b), _adasum.combine(b, a))


@ranks(3)
def test_adasum_wants_a_power_of_two() -> None:
    with pytest.raises(CollectiveError, match="3 ranks do not allow"):
        hora.allreduce(torch.ones(1), op=hora.Adasum)
    with pytest.raises(CollectiveError, match="no Adasum of int64"):
        hora.allreduce(torch.ones(1, dtype=torch.int64), op=hora.Adasum)


@ranks(2, 3)
def test_sparse_allreduce_adds_the_elements_of_all_ranks() -> None:
    size, rank = hora.size(), hora.rank()
    dense = [torch.zeros(5, 4, 2) for _ in range(size)]
    for other, tensor in enumerate(dense):
        tensor[other, other] = other + 1.0
        tensor[3] += other  # rank 0 has fewer elements
    mine = dense[rank].to_sparse(1 + rank % 1)
    total = sum(dense)
    assert isinstance(total, torch.Tensor)
    handle = hora.sparse_allreduce_async(mine, name="sparse", op=hora.Sum)
    assert torch.equal(handle().to_dense(), total)
    # Not coalesced: two elements at one place.
    twice = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 4, 2), (5, 4, 2), check_invariants=True)
    result = hora.synchronize(hora.sparse_allreduce_async(twice))
    assert result.to_dense()[1].eq(2).all()
    nothing = torch.zeros(5, 4, 2).to_sparse(1)
    result = hora.synchronize(hora.sparse_allreduce_async(twice if rank == 0 else nothing, op=hora.Sum))
    assert result.to_dense().sum() == 16
    with pytest.raises(CollectiveError, match="not torch.strided"):
        hora.sparse_allreduce_async(dense[0])
    with pytest.raises(CollectiveError, match="Average and Sum"):
        hora.sparse_allreduce_async(mine, op=hora.Max)


@ranks(2)
def test_wrong_arguments_are_told_before_anything_is_sent() -> None:
    ones = torch.ones(4)
    for call, match in (
        (lambda: hora.grouped_allreduce([]), "an empty list"),
        (lambda: hora.grouped_allreduce(ones), "not Tensor"),
        (lambda: hora.grouped_allreduce_([ones, ones]), "a tensor twice"),
        (lambda: hora.alltoall(torch.ones(())), "has none"),
        (lambda: hora.alltoall(torch.ones(3)), "3 rows do not divide among 2 ranks"),
        (lambda: hora.alltoall(ones, splits=[1, 2]), r"\[1, 2\] do not sum to the 4 rows"),
        (lambda: hora.alltoall(ones, splits=[5, -1]), "do not sum"),
        (lambda: hora.alltoall(ones, splits=[4]), "are not 2 whole numbers"),
        (lambda: hora.alltoall(ones, splits=torch.tensor([2.0, 2.0])), "whole numbers"),
        (lambda: hora.reducescatter(torch.ones(())), "has no dimensions"),
        (lambda: hora.reducescatter(ones, op=hora.Adasum), "no Adasum"),
        (lambda: hora.allreduce(ones.long(), op=hora.Average), "truncated"),
        (lambda: hora.synchronize(3), "not int"),
    ):
        with pytest.raises(CollectiveError, match=match):
            call()
    hora.barrier()

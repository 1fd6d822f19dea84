"""Collectives against what one process computes from all ranks' tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (0,), (0, 3), (17,), (3, 5, 2), (1031,)]
FOLD = {
    hora.Sum: torch.add,
    hora.Min: torch.minimum,
    hora.Max: torch.maximum,
    hora.Product: torch.mul,
}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, *, case: int) -> torch.Tensor:
    """What ``rank`` contributes; every rank can compute every other rank's part."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape, generator=generator).to(
            dtype
        )  # sums wrap in 8 bits: they must alike
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parts(shape: tuple[int, ...], dtype: torch.dtype, *, case: int) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, case=case) for rank in range(hora.size())]


@ranks(1, 2, 3, 4)
def test_allreduce_of_integers_is_exact() -> None:
    for case, dtype in enumerate(INTEGERS):
        for shape in SHAPES:
            given = parts(shape, dtype, case=case)
            for op, fold in FOLD.items():
                result = hora.allreduce(given[hora.rank()], op=op)
                assert result.dtype == dtype
                assert torch.equal(result, functools.reduce(fold, given)), (dtype, shape, op)


@ranks(1, 2, 3, 4)
def test_allreduce_of_floats_is_within_one_rounding() -> None:
    for case, dtype in enumerate(FLOATS):
        for shape in SHAPES:
            given = parts(shape, dtype, case=case)
            exact = [tensor.double() for tensor in given]
            for op, fold in FOLD.items():
                check_rounding(
                    hora.allreduce(given[hora.rank()], op=op), functools.reduce(fold, exact), dtype
                )
            check_rounding(hora.allreduce(given[hora.rank()]), sum(exact) / len(exact), dtype)


def check_rounding(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Half precision: at most the neighbour of the rounded reference. Wider: the order of additions shows."""
    assert result.dtype == dtype
    assert result.shape == exact.shape
    spacing = torch.finfo(dtype).eps * (1 if dtype in (torch.float16, torch.bfloat16) else 4 * hora.size())
    bound = spacing * exact.abs() + torch.finfo(dtype).eps * 1e-2
    if dtype in (torch.float32, torch.float64):  # cancellation: relative to the terms, which are below 5
        bound = bound + torch.finfo(dtype).eps * 20
    assert bool(((result.double() - exact).abs() <= bound).all())


@ranks(1, 2, 3)
def test_allreduce_of_bool_is_all_and_any() -> None:
    given = parts((64,), torch.bool, case=1)
    stacked = torch.stack(given)
    mine = given[hora.rank()]
    assert torch.equal(hora.allreduce(mine, op=hora.Min), stacked.all(0))
    assert torch.equal(hora.allreduce(mine, op=hora.Product), stacked.all(0))
    assert torch.equal(hora.allreduce(mine, op=hora.Max), stacked.any(0))


@ranks(2)
def test_inputs_keep_their_values_layout_and_history() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) * (hora.rank() + 1)
    strided = base.t()[::2]
    assert not strided.is_contiguous()
    kept = strided.clone()
    expected = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[::2] * 3
    assert torch.equal(hora.allreduce(strided, op=hora.Sum), expected)
    assert torch.equal(strided, kept)
    assert torch.equal(hora.broadcast(strided, 1), torch.arange(24.0).reshape(4, 6).t()[::2] * 2)
    leaf = torch.full((3,), float(hora.rank()), requires_grad=True)
    assert hora.allreduce(leaf * 2).tolist() == [1.0] * 3
    assert hora.allreduce(leaf * 2).requires_grad
    assert hora.allgather(leaf * 2).tolist() == [0.0] * 3 + [2.0] * 3


@ranks(1, 2, 3, 4)
def test_allgather_joins_different_lengths_of_every_dtype() -> None:
    for case, dtype in enumerate([*INTEGERS, *FLOATS, torch.bool, torch.complex64]):
        for lengths in ([0, 3, 1, 2], [0, 0, 0, 0], [2, 2, 2, 2], [0, 0, 5, 0]):
            given = [values(rank, (lengths[rank], 2), dtype, case=case) for rank in range(hora.size())]
            result = hora.allgather(given[hora.rank()])
            assert result.dtype == dtype
            assert torch.equal(result, torch.cat(given)), (dtype, lengths)
    assert hora.allgather(torch.tensor(hora.rank())).tolist() == list(range(hora.size()))


@ranks(3)
def test_allgather_of_unlike_tensors_fails_alike_everywhere() -> None:
    with pytest.raises(
        CollectiveError, match=r"rank 0 gave float32 of shape \(2, 3\), but rank 2 gave .*\(2, 4\)"
    ):
        hora.allgather(torch.zeros(2, 4 if hora.rank() == 2 else 3))
    with pytest.raises(CollectiveError, match="rank 1 gave int64"):
        hora.allgather(torch.zeros(2, dtype=torch.int64 if hora.rank() == 1 else torch.float32))
    with pytest.raises(CollectiveError, match="rank 1 has 20 dimensions"):
        hora.allgather(torch.zeros([1] * (20 if hora.rank() == 1 else 2)))
    assert hora.allreduce(torch.ones(()), op=hora.Sum) == 3  # the ranks are still in step


@ranks(1, 2, 3)
def test_broadcast_gives_the_roots_tensor() -> None:
    for case, dtype in enumerate([*INTEGERS, *FLOATS, torch.bool, torch.complex128]):
        for shape in SHAPES:
            for root in range(hora.size()):
                given = parts(shape, dtype, case=case)
                result = hora.broadcast(given[hora.rank()], root)
                assert result.dtype == dtype
                assert torch.equal(result, given[root])


@ranks(2)
def test_what_cannot_be_reduced_is_refused_with_the_fix() -> None:
    for call, match in (
        (
            lambda: hora.allreduce(torch.ones(2, dtype=torch.int64)),
            r"no Average of int64.*op=hora.Sum, or tensor.float",
        ),
        (lambda: hora.allreduce(torch.ones(2) > 0, op=hora.Sum), r"no Sum of bool.*hora.Max for any"),
        (
            lambda: hora.allreduce(torch.ones(2, dtype=torch.complex64), op=hora.Sum),
            "complex64.*view_as_real",
        ),
        (lambda: hora.allreduce(torch.ones(2, device="meta")), r"on meta, .*on cpu only.*tensor.to\('cpu'\)"),
        (lambda: hora.allreduce(torch.eye(2).to_sparse()), "to_dense"),
        (lambda: hora.allreduce([1.0]), "not list"),
        (lambda: hora.allreduce(torch.ones(2), "sum"), "op=hora.Sum"),
        (
            lambda: hora.broadcast(torch.ones(2), 2),
            "root_rank=2 is not a rank of this job \\(0 to 1\\)",
        ),
        (lambda: hora.broadcast(torch.ones(2), -1), "root_rank=-1"),
        (lambda: hora.broadcast_object(1, 7), "root_rank=7"),
        (lambda: hora.allgather(torch.ones(2, device="meta")), "on meta"),
    ):
        with pytest.raises(CollectiveError, match=match):
            call()
    hora.barrier()


@ranks(1, 2, 3)
def test_objects_travel() -> None:
    thing = {
        "rank": hora.rank(),
        "tensor": torch.full((2,), hora.rank()),
        "text": "ä" * (1 + 1000 * hora.rank()),
    }
    last = hora.broadcast_object(thing, hora.size() - 1)
    assert last["rank"] == hora.size() - 1
    assert last["tensor"].tolist() == [hora.size() - 1] * 2
    everyone = hora.allgather_object(thing)
    assert [other["rank"] for other in everyone] == list(range(hora.size()))
    assert hora.allgather_object(None) == [None] * hora.size()


@ranks(2)
def test_an_object_that_cannot_be_pickled_fails_everywhere() -> None:
    with pytest.raises(CollectiveError, match="object of rank 0 cannot be pickled"):
        hora.broadcast_object((lambda: 0) if hora.rank() == 0 else None)
    with pytest.raises(CollectiveError, match="object of rank 1 cannot be pickled"):
        hora.allgather_object((lambda: 0) if hora.rank() == 1 else None)
    hora.barrier()

"""Means over ranks, weighted by what they are made of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import CollectiveError

FINITE = st.floats(-1e6, 1e6)


@settings(max_examples=3, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.tuples(FINITE, st.integers(0, 1000)), min_size=size, max_size=size),
            min_size=10,
            max_size=20,
        )
    )
)
def test_the_mean_over_ranks_is_the_mean_over_samples(cases: list[list[tuple[float, int]]]) -> None:
    def body() -> list[float]:
        return [hora.mean(*case[hora.rank()]) for case in cases]

    for found in run_ranks(len(cases[0]), body):
        for case, mean in zip(cases, found, strict=True):
            weight = sum(share for _, share in case)
            if weight == 0:
                assert math.isnan(mean)
                continue
            exact = math.fsum(value * share for value, share in case) / weight
            size = math.fsum(abs(value) * share for value, share in case) / weight
            assert abs(mean - exact) <= 1e-15 * 8 * size + 1e-300


@ranks(1, 2, 3)
def test_mappings_tensors_and_empty_shares() -> None:
    size, rank = hora.size(), hora.rank()
    means = hora.mean(
        {"loss": torch.tensor(float(rank), requires_grad=True), "accuracy": 1}, weight=torch.tensor(2)
    )
    assert means == {"loss": (size - 1) / 2, "accuracy": 1.0}
    assert list(means) == ["loss", "accuracy"]
    # A rank that had no samples does not count, whatever it computed from nothing.
    only = hora.mean(7.0 if rank == 0 else math.nan, weight=3 if rank == 0 else 0)
    assert only == 7.0
    assert math.isnan(hora.mean(math.nan, weight=1))
    many = {f"value {index}": index + rank for index in range(200)}
    assert hora.mean(many)["value 150"] == 150 + (size - 1) / 2


@ranks(3)
def test_unlike_names_are_an_error_on_every_rank() -> None:
    for mine, others in (({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, {"a": 1.0, "b": 2.0}), ({}, {"a": 1.0})):
        with pytest.raises(CollectiveError, match="values of different names"):
            hora.mean(mine if hora.rank() == 1 else others)
    assert hora.mean(1.0) == 1.0


@ranks(1)
def test_what_is_not_a_number_is_refused() -> None:
    with pytest.raises(CollectiveError, match=r"loss is a tensor of shape \(2,\).*value.mean"):
        hora.mean({"loss": torch.ones(2)})
    with pytest.raises(CollectiveError, match="weight=-1.0 is negative"):
        hora.mean(1.0, weight=-1)

"""Fusion plans: every tensor once, one dtype per bucket, as full as they can be; pieces that fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hora.adapter.fusion import pieces, plan

BYTES = {"float16": 2, "float32": 4, "float64": 8}

tensors = st.lists(
    st.tuples(st.sampled_from(sorted(BYTES)), st.integers(0, 40)).map(
        lambda found: (found[0], found[1], found[1] * BYTES[found[0]])
    ),
    max_size=60,
)


@given(tensors, st.integers(1, 200))
def test_a_plan_is_a_partition_into_full_buckets(asked: list[tuple[str, int, int]], limit: int) -> None:
    buckets = plan(asked, limit=limit)
    assert sorted(number for bucket in buckets for number in bucket.tensors) == list(range(len(asked)))
    assert buckets == plan(iter(asked), limit=limit)
    assert [bucket.tensors[0] for bucket in buckets] == sorted(bucket.tensors[0] for bucket in buckets)
    last: dict[str, tuple[int, int]] = {}
    for bucket in buckets:
        found = [asked[number] for number in bucket.tensors]
        assert {dtype for dtype, _, _ in found} == {bucket.dtype}
        assert bucket.elements == tuple(elements for _, elements, _ in found)
        assert bucket.bytes == sum(size for _, _, size in found)
        assert bucket.bytes <= limit or len(bucket.tensors) == 1 or set(bucket.elements[:-1]) == {0}
        assert bucket.offsets == tuple(sum(bucket.elements[:place]) for place in range(len(found) + 1))
        if bucket.dtype in last:
            bytes_before, number_before = last[bucket.dtype]
            assert bucket.tensors[0] > number_before  # the order within a dtype stays
            assert bytes_before + found[0][2] > limit  # else it would have had room
        last[bucket.dtype] = bucket.bytes, bucket.tensors[-1]


def test_a_plan_on_paper() -> None:
    found = plan([("a", 3, 12), ("b", 1, 8), ("a", 4, 16), ("a", 2, 8), ("b", 9, 72)], limit=30)
    assert [(bucket.dtype, bucket.tensors) for bucket in found] == [
        ("a", (0, 2)),
        ("b", (1,)),
        ("a", (3,)),
        ("b", (4,)),
    ]


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5_000))
def test_pieces_cover_a_buffer_evenly(elements: int, size: int, limit: int) -> None:
    found = pieces(elements, size, limit=limit)
    assert [place for start, stop in found for place in range(start, stop)] == list(range(elements))
    lengths = {stop - start for start, stop in found}
    assert len(lengths) < 2 or max(lengths) - min(lengths) == 1
    assert all(length * size <= limit or length == 1 for length in lengths)
    most = max(1, limit // size)
    assert len(found) == -(-elements // most)  # none more than needed

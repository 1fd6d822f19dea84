"""The collectives that are timed, whoever carries them out; and, as a program, a rank of the MPI contender.

Imports no framework: the ranks of MPI work on NumPy arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from _jobs import Message, Run, bursts, serve

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all")


class Operations(Protocol):
    """A contender's collectives, on its own kind of float32 arrays."""

    rank: int
    size: int

    def empty(self, count: int) -> Any: ...
    def barrier(self) -> None: ...
    def all_reduce(self, array: Any) -> None: ...
    def reduce_scatter(self, target: Any, source: Any) -> None: ...
    def all_gather(self, target: Any, source: Any) -> None: ...
    def broadcast(self, array: Any) -> None: ...
    def all_to_all(self, target: Any, source: Any) -> None: ...


def prepared(collective: str, size_in_bytes: int, by: Operations, empty: Callable[[int], Any]) -> Run:
    """A call that carries out the collective once, proved to give the right result.

    The size is that of the whole: of what is reduced or scattered, and of what all ranks have gathered.
    """
    part = max(1, size_in_bytes // 4 // by.size)
    whole = max(1, size_in_bytes // 4) if collective in ("all-reduce", "broadcast") else part * by.size
    large, small = empty(whole), empty(part)
    large[...] = by.rank + 1
    small[...] = by.rank + 1
    result = large
    run: Run
    right: list[float]
    if collective == "all-reduce":
        run, right = functools.partial(by.all_reduce, large), [by.size * (by.size + 1) / 2]
    elif collective == "broadcast":
        run, right = functools.partial(by.broadcast, large), [1]
    elif collective == "reduce-scatter":
        run, right = functools.partial(by.reduce_scatter, small, large), [by.size * (by.size + 1) / 2]
        result = small
    elif collective == "all-gather":
        run, right = functools.partial(by.all_gather, large, small), [rank + 1 for rank in range(by.size)]
    else:
        result = empty(whole)
        run = functools.partial(by.all_to_all, result, large)
        right = [100 * rank + by.rank for rank in range(by.size)]
        for rank, part_for in enumerate(large.reshape(by.size, -1)):
            part_for[...] = 100 * by.rank + rank
    run()
    parts = result.reshape(len(right), -1)
    if not all(bool((part == value).all()) for part, value in zip(parts, right, strict=True)):
        raise AssertionError(f"{collective} of {size_in_bytes} bytes gives a wrong result")
    for array in (large, small):
        array[...] = 0  # repeated sums of anything else would grow without end
    return run


class _Mpi:
    """MPI's collectives, in place where the others are too."""

    def __init__(self) -> None:
        import numpy
        from mpi4py import MPI

        self._float = numpy.float32
        self._numpy = numpy
        self._all = MPI.COMM_WORLD
        self._in_place: Any = MPI.IN_PLACE
        self.rank: int = self._all.Get_rank()
        self.size: int = self._all.Get_size()

    def empty(self, count: int) -> Any:
        return self._numpy.empty(count, self._float)

    def barrier(self) -> None:
        self._all.Barrier()  # type: ignore[no-untyped-call, unused-ignore]

    def all_reduce(self, array: Any) -> None:
        self._all.Allreduce(self._in_place, array)

    def reduce_scatter(self, target: Any, source: Any) -> None:
        self._all.Reduce_scatter_block(source, target)

    def all_gather(self, target: Any, source: Any) -> None:
        self._all.Allgather(source, target)

    def broadcast(self, array: Any) -> None:
        self._all.Bcast(array)

    def all_to_all(self, target: Any, source: Any) -> None:
        self._all.Alltoall(source, target)


def main() -> None:
    mpi = _Mpi()

    def prepare(case: Message) -> Mapping[str, Run]:
        return {"MPI": prepared(case["collective"], case["bytes"], mpi, mpi.empty)}

    serve(lambda: bursts(prepare, mpi.barrier), rank=mpi.rank)


if __name__ == "__main__":
    main()

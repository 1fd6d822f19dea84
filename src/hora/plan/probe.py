"""What this host's cores do for each other: alone, and all at once. Takes about a second."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

__all__ = ["Probe", "cores", "probe"]

SECONDS = 0.1
"""Of one measurement."""
ROUNDS = 5
SIZE = 96
"""Rows of a matrix whose product lives in a core's cache, as a convolution's tiles do."""
LENGTH = 4_000_000
"""Numbers of a vector that lives in memory, as gradients and large activations do."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Ratios of a core's own speed while all others work too to its speed alone (at most 1), and memory.

    Attributes:
        products: matrix products in cache.
        streams: sums of vectors in memory.
        bandwidth: bytes/s that one core moves while all do.
    """

    products: float
    streams: float
    bandwidth: float

    @property
    def slowdown(self) -> float:
        """Factor on a step when all cores train; half of its time is taken to be products, half streams."""
        return 0.5 / self.products + 0.5 / self.streams


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def probe(workers: int) -> Probe:
    """Measure with as many processes as there will be workers on this host.

    A product of this size is done by one thread. Rounds alone and together take turns, and
    the least disturbed one counts: the upper quartile.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, ours), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        ratios: dict[str, list[float]] = {"products": [], "streams": []}
        moved = []
        for _ in range(ROUNDS):
            for kind, found in ratios.items():
                alone = _ask(pipes[:1], kind)[0]
                together = _ask(pipes, kind)
                found.append(min(1.0, sum(together) / len(together) / alone))
                if kind == "streams":
                    moved.append(sum(together) / len(together))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
    return Probe(
        products=float(np.quantile(ratios["products"], 0.75)),
        streams=float(np.quantile(ratios["streams"], 0.75)),
        bandwidth=float(np.median(moved)) * 12.0 * LENGTH,
    )


def _ask(pipes: list[Connection], kind: str) -> list[float]:
    """Repetitions per second of processor time of each process."""
    for pipe in pipes:
        pipe.send(kind)
    return [float(pipe.recv()) for pipe in pipes]


def _serve(pipe: Connection, other: Connection) -> None:
    other.close()
    matrix = np.ones((SIZE, SIZE), dtype=np.float32)
    left, right = np.ones(LENGTH, dtype=np.float32), np.ones(LENGTH, dtype=np.float32)
    out, product = np.empty_like(left), np.empty_like(matrix)
    while True:
        try:
            kind = pipe.recv()
        except EOFError:
            return
        # Processor time counts: who else uses the host now is not what workers do to each other.
        until, start, count = time.perf_counter() + SECONDS, time.process_time(), 0
        while time.perf_counter() < until:
            if kind == "products":
                np.matmul(matrix, matrix, out=product)
            else:
                np.add(left, right, out=out)
            count += 1
        pipe.send(count / max(1e-6, time.process_time() - start))

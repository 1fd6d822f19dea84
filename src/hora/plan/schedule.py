"""Two small event schedules: gradients reduced while backward runs, and micro-batches in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hora.core.errors import UsageError

__all__ = ["BUCKET", "exposed", "one_forward_one_backward"]

BUCKET = 25e6
"""Bytes of one bucket of gradients, as PyTorch's DistributedDataParallel has it."""


def exposed(size: float, backward: float, cost: Callable[[float], float], *, bucket: float = BUCKET) -> float:
    """Seconds that a step waits for gradients after backward has ended.

    Buckets become ready evenly over ``backward``, one after the other is reduced: ``start = max(ready,
    end of the one before)``.

    Args:
        size: bytes of all gradients.
        backward: seconds; 0 where nothing overlaps.
        cost: seconds to reduce so many bytes.
        bucket: bytes; the last one holds what is left.
    """
    if size <= 0:
        return 0.0
    count = max(1, min(4096, round(size / bucket)))
    each = cost(size / count)
    end = 0.0
    for index in range(count):
        end = max(backward * (index + 1) / count, end) + each
    return end - backward


def one_forward_one_backward(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, send: float = 0.0
) -> float:
    """Seconds of a 1F1B pipeline whose stages need not be equal.

    Stage ``s`` of ``p`` runs ``min(m, p - s)`` forwards, then one backward and one forward in turn, then the
    backwards that are left; each waits for its neighbour's result.

    Args:
        forward: seconds of one micro-batch on each stage.
        backward: likewise.
        micro_batches: at least 1.
        send: seconds between two stages.

    Raises:
        UsageError: the two lists differ in length, or there is no micro-batch.
    """
    stages = len(forward)
    if len(backward) != stages or stages == 0 or micro_batches < 1:
        raise UsageError(
            f"{stages} forwards, {len(backward)} backwards, {micro_batches} micro-batches: no pipeline.",
            fix="Give both times of each stage, and one micro-batch or more.",
        )
    orders = []
    for stage in range(stages):
        warm = min(micro_batches, stages - stage)
        order = [("f", index) for index in range(warm)]
        for index in range(micro_batches):
            order.append(("b", index))
            if warm + index < micro_batches:
                order.append(("f", warm + index))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * stages, [0] * stages
    left = 2 * stages * micro_batches
    while left:
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, index = orders[stage][position[stage]]
                needs = _before(kind, index, stage, stages)
                if needs is not None and needs not in done:
                    break
                ready = done[needs] + (send if needs[2] != stage else 0.0) if needs else 0.0
                seconds = forward[stage] if kind == "f" else backward[stage]
                free[stage] = done[kind, index, stage] = max(free[stage], ready) + seconds
                position[stage] += 1
                left -= 1
    return max(free)


def _before(kind: str, index: int, stage: int, stages: int) -> tuple[str, int, int] | None:
    """What a task waits for on another stage, or on its own for the last stage's backward."""
    if kind == "f":
        return ("f", index, stage - 1) if stage else None
    return ("b", index, stage + 1) if stage + 1 < stages else ("f", index, stage)

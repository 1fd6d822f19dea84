"""Means over all ranks, weighted by what each mean is made of."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import overload

import torch
import torch.distributed as dist

from hora.adapter.guard import collective
from hora.adapter.metrics import check_weight, refuse_names
from hora.core.errors import CollectiveError
from hora.torch._context import required
from hora.torch._process_sets import global_process_set

__all__ = ["mean"]

Number = float | torch.Tensor

_SLOTS = 64
"""Messages are padded to a multiple of this, so that ranks that name another number of values still
meet in equal messages and learn of it."""

_HASH_BITS = 20
"""Squares of the hash of the names stay exact in float64 when summed over 2**13 ranks."""


@overload
def mean(value: Number, weight: Number = 1.0) -> float: ...
@overload
def mean(value: Mapping[str, Number], weight: Number = 1.0) -> dict[str, float]: ...


def mean(value: Number | Mapping[str, Number], weight: Number = 1.0) -> float | dict[str, float]:
    """The mean over all ranks, where each rank's value counts ``weight`` times.

    Give the number of samples as the weight and the result is the mean over samples, however
    unevenly they are spread: ``hora.mean(loss, weight=len(batch))``. Sums and weights are added up in
    float64 in one collective, however many values there are.

    Args:
        value: a number, a tensor of one element, or a mapping of names to such.
        weight: how much this rank's values count, 0 or more. A value of weight 0 is ignored, even nan.

    Returns:
        A float, or a dict of floats with the keys of ``value``; nan where all weights are 0.

    Raises:
        CollectiveError: a value of several elements, a negative weight, or, on every rank, names that
            differ between ranks.
    """
    context = required("mean")
    values = value if isinstance(value, Mapping) else {"": value}
    share = _number("weight", weight)
    check_weight(share)
    names = sorted(values)
    mark = zlib.crc32("\n".join(names).encode()) >> (32 - _HASH_BITS)
    numbers = [_number(name or "value", values[name]) for name in names]
    row = [share, float(mark), float(mark * mark)] + [number * share if share else 0.0 for number in numbers]
    row += [0.0] * (-len(row) % _SLOTS)
    if context.world.size > 1:
        with (
            context.timeline.span("mean", lane="collectives"),
            collective(context, "mean", label=", ".join(names) or None),
        ):
            wire = torch.tensor(row, dtype=torch.float64, device=context.control)
            number = context.presence.call("mean", global_process_set)
            work = dist.all_reduce(wire, group=context.group, async_op=True)
            context.presence.wait(work, wire.device, number=number, what="mean")
            row = wire.tolist()
        # Equal on all ranks if and only if size * sum of squares is the square of the sum.
        if context.world.size * int(row[2]) != int(row[1]) ** 2:
            raise refuse_names(context.world.rank, names)
    total = row[0]
    means = {name: row[3 + index] / total if total else math.nan for index, name in enumerate(names)}
    return {name: means[name] for name in values} if isinstance(value, Mapping) else means[""]


def _number(name: str, value: Number) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise CollectiveError(
            f"mean: {name} is a tensor of shape {tuple(value.shape)}, not one number.",
            fix="Reduce it on this rank first: value.mean(), with its number of elements as the weight.",
        )
    return float(value.detach() if isinstance(value, torch.Tensor) else value)

"""The random streams of all ranks in each commit, so that a rank's goes on whoever has it.

A stream belongs to a rank: with as many workers as before, whoever takes the place of one that died goes on
with the numbers that it would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from hora.adapter.guard import collective
from hora.torch._context import Context
from hora.torch._wire import start_gather, wait_for
from hora.torch.checkpoint._random import derive, set_streams, streams

__all__ = ["gather_streams", "take_stream"]

KEYS = 624
"""Words of a Mersenne Twister, which numpy and Python have."""

SECTIONS = ("torch", "numpy", "python")


def gather_streams(context: Context, before: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The streams of all ranks, a row for each, uint8 on the CPU; and which row is this rank's.

    Every rank of an elastic job calls it. In another job there is this rank's row alone.

    Args:
        context: of the job.
        before: those known so far; rows of ranks that are not there now stay, for whoever comes.
    """
    mine = torch.from_numpy(_packed(streams(context.device)))
    size = context.world.size
    rows, place = mine[None], 0
    if size > 1 and context.member is not None:
        from hora.torch._process_sets import global_process_set

        own = mine.to(context.control)
        everyone = own.new_empty(size * len(own))
        with collective(context, "commit", [own]):
            context.presence.call("commit", global_process_set)
            wait_for(start_gather(everyone, own, context.group), own, context.group)
        rows, place = everyone.view(size, -1).cpu(), context.world.rank
    if before is not None and len(before) > len(rows):
        rows = torch.cat([rows, before[len(rows) :]])
    return rows, place


def take_stream(rows: torch.Tensor, context: Context, *, rank: int, commits: int) -> None:
    """Go on with the stream of a rank; one that nobody has had begins as a function of rank 0's.

    Streams that all ranks have had alike are for decisions that they share, and stay alike.
    """
    if rank < len(rows):
        set_streams(_unpacked(rows[rank].numpy()), context.device)
        return
    parts = [_sections(row.numpy()) for row in rows]
    alike = [
        len(parts) > 1 and all(numpy.array_equal(part[name], parts[0][name]) for part in parts[1:])
        for name in SECTIONS
    ]
    derive(_unpacked(rows[0].numpy()), context.device, step=commits, rank=rank, alike=alike)


def _packed(found: Mapping[str, Any]) -> NDArray[numpy.uint8]:
    _, keys, place, has_gauss, gauss = found["numpy"]
    _, words, following = found["python"]
    parts = [
        found["torch"].numpy(),
        numpy.asarray(keys, numpy.uint32).view(numpy.uint8),
        numpy.array([place, has_gauss, gauss], numpy.float64).view(numpy.uint8),
        numpy.array(words, numpy.uint32).view(numpy.uint8),
        numpy.array([following is not None, following or 0.0], numpy.float64).view(numpy.uint8),
        found["cuda"].numpy() if "cuda" in found else numpy.empty(0, numpy.uint8),
    ]
    return numpy.concatenate([numpy.array([len(parts[0])], numpy.uint32).view(numpy.uint8), *parts])


def _sections(row: NDArray[numpy.uint8]) -> dict[str, NDArray[numpy.uint8]]:
    length = int(row[:4].copy().view(numpy.uint32)[0])
    ends = numpy.cumsum([4, length, 4 * KEYS + 24, 4 * (KEYS + 1) + 16])
    first, second, third, fourth = (int(end) for end in ends)
    return {
        "torch": row[first:second].copy(),
        "numpy": row[second:third].copy(),
        "python": row[third:fourth].copy(),
        "cuda": row[fourth:].copy(),
    }


def _unpacked(row: NDArray[numpy.uint8]) -> dict[str, Any]:
    parts = _sections(row)
    place, has_gauss, gauss = parts["numpy"][4 * KEYS :].view(numpy.float64)
    following = parts["python"][4 * (KEYS + 1) :].view(numpy.float64)
    found: dict[str, Any] = {
        "torch": torch.from_numpy(parts["torch"]),
        "numpy": [
            "MT19937",
            parts["numpy"][: 4 * KEYS].view(numpy.uint32),
            *(int(place), int(has_gauss), float(gauss)),
        ],
        "python": (
            3,  # of the form that random.getstate() has
            tuple(parts["python"][: 4 * (KEYS + 1)].view(numpy.uint32).tolist()),
            float(following[1]) if following[0] else None,
        ),
    }
    if len(parts["cuda"]):
        found["cuda"] = torch.from_numpy(parts["cuda"])
    return found

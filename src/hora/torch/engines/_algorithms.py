"""The collectives of one team, as generators: each yields where it must wait for other ranks.

Whoever drives one (see ``_queue.py``) may stop for a while and go on later, from another thread. Data
passes through the slots, a piece per phase. Large tensors that lie in a
:class:`~hora.torch.engines._buffers.Buffer` on every rank are read by the others where they are.

Every tensor is a vector here (one dimension, contiguous, without gradient).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from hora.torch.engines._buffers import Buffers, same_buffer
from hora.torch.engines._kernels import reduce_into
from hora.torch.engines._team import FREE, SLOT, Team

__all__ = [
    "Bounded",
    "Call",
    "Steps",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Steps = Generator[None, None, None]

DIRECT = 3
"""Ranks up to which each reduces everything itself: that costs less than a second phase per piece."""

SMALL = 1 << 13
"""Bytes up to which more ranks do so too."""

LARGE = 1 << 18
"""Bytes above which ranks first tell each other where their data lies: it may need no copying."""

BLOCK = 1 << 20
"""Bytes that are reduced and given to the others at a time. Smaller ones cost more calls, larger ones leave
the cache between the two; measured from 32 KiB to the whole."""

_NUMBER, _PLACE = FREE, FREE + 1


@dataclass(frozen=True)
class Call:
    """What all ranks must call alike.

    Attributes:
        text: for messages.
        number: of the text, to compare quickly.
    """

    text: str
    number: int

    @classmethod
    def of(cls, text: str) -> Call:
        return cls(text, crc32(text.encode()))


class Bounded(dict[Any, Any]):
    """A cache, of calls say, that starts anew when it is full."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, value)


def barrier(team: Team, call: Call) -> Steps:
    """Go on when all have come."""
    yield from _begin(team, call)


def all_reduce(team: Team, call: Call, flat: torch.Tensor, op: Any, buffers: Buffers) -> Steps:
    """Replace ``flat`` by the reduction of all ranks' vectors."""
    count, width, me = flat.numel(), flat.element_size(), team.index
    begun = count * width > LARGE
    if begun:
        views = yield from _in_place(team, call, [flat], buffers)
        if views is not None:
            yield from _all_reduce_in_place(team, views, op)
            return
    direct = team.size <= DIRECT or count * width <= SMALL
    if direct and not begun:  # as the lines below, with less of everything: here each microsecond counts
        slots = team.slots(flat.dtype, count)
        slots[me].copy_(flat)
        team.tell(_NUMBER, call.number)
        team.arrive()
        while not team.here():
            yield
        if team.told(_NUMBER).count(call.number) != team.size:
            yield from _disagree(team, call)
        reduce_into(flat, slots, op)
        return
    for piece in _pieces(flat, SLOT):
        slots = team.slots(flat.dtype, piece.numel())
        slots[me].copy_(piece)
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        if direct:
            reduce_into(piece, slots, op)
            continue
        share = -(-piece.numel() // team.size)
        results = team.slots(flat.dtype, share)
        sources = [slot[me * share : (me + 1) * share] for slot in slots]
        reduce_into(results[me][: sources[0].numel()], sources, op)
        yield from _meet(team)
        for target, result in zip(torch.split(piece, share), results, strict=False):
            target.copy_(result[: target.numel()])


def _all_reduce_in_place(team: Team, views: Sequence[torch.Tensor], op: Any) -> Steps:
    count, width = views[0].numel(), views[0].element_size()
    # Shares begin on cache lines, which no two ranks then write at once.
    line = max(64 // width, 1)
    share = -(-count // (team.size * line)) * line
    end = min((team.index + 1) * share, count)
    step = BLOCK // width
    for low in range(team.index * share, end, step):
        blocks = [view[low : min(low + step, end)] for view in views]
        reduce_into(blocks[0], blocks, op)
        for block in blocks[1:]:
            block.copy_(blocks[0])
    yield from _meet(team)


def reduce(team: Team, call: Call, flat: torch.Tensor, root: int, op: Any) -> Steps:
    """Replace the root's ``flat`` by the reduction of all ranks' vectors."""
    begun = False
    for piece in _pieces(flat, SLOT):
        slots = team.slots(flat.dtype, piece.numel())
        slots[team.index].copy_(piece)
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        if team.index == root:
            reduce_into(piece, slots, op)


def broadcast(team: Team, call: Call, flat: torch.Tensor, root: int, *, to: int | None = None) -> Steps:
    """Replace ``flat`` by the root's: on all ranks, or on one."""
    begun = False
    for piece in _pieces(flat, SLOT):
        slots = team.slots(flat.dtype, piece.numel())
        if team.index == root:
            slots[root].copy_(piece)
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        if team.index != root if to is None else team.index == to:
            piece.copy_(slots[root])


def all_gather(
    team: Team, call: Call, outputs: Sequence[torch.Tensor], flat: torch.Tensor, buffers: Buffers
) -> Steps:
    """Fill ``outputs``, one for each rank, with the ranks' vectors, which are equally long."""
    begun = flat.numel() * flat.element_size() > LARGE
    if begun:
        views = yield from _in_place(team, call, [flat], buffers)
        if views is not None:
            later = []
            for output, view in zip(outputs, views, strict=True):
                if output.data_ptr() == view.data_ptr():
                    continue
                if _distance(output, flat) is None:
                    output.copy_(view)
                else:  # the others read it still
                    later.append((output, view.clone()))
            yield from _meet(team)
            for output, copy in later:
                output.copy_(copy)
            return
    (flat,) = _apart([flat], outputs)
    per = max(SLOT // flat.element_size(), 1)
    for index, piece in enumerate(_pieces(flat, SLOT)):
        slots = team.slots(flat.dtype, piece.numel())
        slots[team.index].copy_(piece)
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        low = index * per
        for output, slot in zip(outputs, slots, strict=True):
            output[low : low + piece.numel()].copy_(slot)


def gather(
    team: Team, call: Call, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int
) -> Steps:
    """Fill the root's ``outputs`` with the ranks' vectors."""
    begun, low = False, 0
    for piece in _pieces(flat, SLOT):
        slots = team.slots(flat.dtype, piece.numel())
        slots[team.index].copy_(piece)
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        if outputs is not None and team.index == root:
            for output, slot in zip(outputs, slots, strict=True):
                output[low : low + piece.numel()].copy_(slot)
        low += piece.numel()


def scatter(
    team: Team, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
) -> Steps:
    """Fill ``output`` with the root's input for this rank."""
    begun, low = False, 0
    if inputs is not None:
        inputs = _apart(inputs, [output])
    for piece in _pieces(output, SLOT // team.size // 64 * 64):
        count = piece.numel()
        slots = team.slots(output.dtype, count * team.size)
        if inputs is not None and team.index == root:
            for target, source in zip(slots[root].view(team.size, -1), inputs, strict=True):
                target.copy_(source[low : low + count])
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        piece.copy_(slots[root][team.index * count : (team.index + 1) * count])
        low += count


def reduce_scatter(
    team: Team,
    call: Call,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    *,
    op: Any,
    buffers: Buffers,
) -> Steps:
    """Fill ``output`` with the reduction of all ranks' inputs for this rank.

    There is one input for each rank, as long as ``output``. Where they lie one behind the other, all of it
    is looked for in the buffers.
    """
    count, width, me = output.numel(), output.element_size(), team.index
    begun = count * width * team.size > LARGE
    if begun:
        views = yield from _in_place(team, call, inputs, buffers)
        if views is not None:
            low = me * count
            distance = _distance(output, views[me])
            own = distance == low * width  # nobody else reads there
            result = output if own or distance is None else torch.empty_like(output)
            vectors = [result, *(view[low : low + count] for view in views)]
            for target, *blocks in zip(*(torch.split(each, BLOCK // width) for each in vectors), strict=True):
                # The operation is done in order, so the result may replace the first two only.
                scratch = torch.empty_like(target) if own and me > 1 else target
                reduce_into(scratch, blocks, op)
                if scratch is not target:
                    target.copy_(scratch)
            yield from _meet(team)
            if result is not output:
                output.copy_(result)
            return
    low, inputs = 0, _apart(inputs, [output])
    for piece in _pieces(output, SLOT // team.size // 64 * 64):
        size = piece.numel()
        slots = team.slots(output.dtype, size * team.size)
        for target, source in zip(torch.split(slots[me], max(size, 1)), inputs, strict=False):
            target.copy_(source[low : low + size])
        yield from _meet(team) if begun else _begin(team, call)
        begun = True
        reduce_into(piece, [slot[me * size : (me + 1) * size] for slot in slots], op)
        low += size


def all_to_all(
    team: Team, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Steps:
    """Fill ``outputs[i]`` with what rank i has as ``inputs[this rank]``; they may be of any length.

    The vectors are bytes.
    """
    size, me = team.size, team.index
    header = -(-16 * size // 64) * 64
    width = (SLOT - header) // size // 64 * 64
    lengths = [each.numel() for each in inputs] + [each.numel() for each in outputs]
    inputs = _apart(inputs, outputs)
    most, piece = 1, 0
    while piece * width < most:
        low = piece * width
        slots = team.slots(torch.uint8, SLOT)
        if piece == 0:
            slots[me][: 16 * size].view(torch.int64).copy_(torch.tensor(lengths, device="cpu"))
        for index, source in enumerate(inputs):
            part = source[low : low + width]
            start = header + index * width
            slots[me][start : start + part.numel()].copy_(part)
        yield from _meet(team) if piece else _begin(team, call)
        if piece == 0:
            table = torch.stack([slot[: 16 * size].view(torch.int64) for slot in slots])
            _compare_lengths(team, table[:, :size], table[:, size:].t())
            most = int(table.max())
        start = header + me * width
        for output, slot in zip(outputs, slots, strict=True):
            target = output[low : low + width]
            target.copy_(slot[start : start + target.numel()])
        piece += 1


def _compare_lengths(team: Team, sent: torch.Tensor, expected: torch.Tensor) -> None:
    """All ranks find the same: what each sends to each must be as long as what that one expects."""
    if torch.equal(sent, expected):
        return
    source, target = (sent != expected).nonzero()[0].tolist()
    team.fail(
        f"all_to_all: rank {team.members[source]} sends {int(sent[source, target])} bytes to rank "
        f"{team.members[target]}, which expects {int(expected[source, target])}."
    )
    team.check()


def _begin(team: Team, call: Call) -> Steps:
    """The first phase of a collective, in which ranks find out whether they call the same."""
    team.tell(_NUMBER, call.number)
    team.arrive()
    while not team.here():
        yield
    if team.told(_NUMBER).count(call.number) != team.size:
        yield from _disagree(team, call)


def _disagree(team: Team, call: Call) -> Steps:
    """Ranks have called different collectives: each tells the others what it called, and all raise."""
    team.describe(call.text)
    yield from _meet(team)
    told = "; ".join(
        f"rank {rank} called {text}" for rank, text in zip(team.members, team.described(), strict=True)
    )
    team.fail(f"At the same place the ranks called different collectives: {told}.")
    team.check()


def _meet(team: Team) -> Steps:
    team.arrive()
    while not team.here():
        yield


def _in_place(
    team: Team, call: Call, tensors: Sequence[torch.Tensor], buffers: Buffers
) -> Generator[None, None, list[torch.Tensor] | None]:
    """Begin; all ranks' vectors where they are, if those of all lie in shared buffers."""
    team.tell(_PLACE, buffers.place(tensors))
    yield from _begin(team, call)
    places = team.told(_PLACE)
    if not same_buffer(places):
        return None
    count = sum(tensor.numel() for tensor in tensors)
    return buffers.views(places, tensors[0].dtype, count)


def _pieces(flat: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    """The vector in pieces of at most so many bytes; one, if it is empty."""
    per = max(width // flat.element_size(), 1)
    return (flat,) if flat.numel() <= per else torch.split(flat, per)


def _distance(vector: torch.Tensor, other: torch.Tensor) -> int | None:
    """Bytes from the start of ``other`` to that of ``vector``; None if they have no memory in common."""
    distance = vector.data_ptr() - other.data_ptr()
    return distance if -vector.nbytes < distance < other.nbytes else None


def _apart(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The sources, copied where a piece that is written would change one that is still to be read."""
    if max((source.nbytes for source in sources), default=0) * max(len(sources), len(targets)) <= SLOT // 2:
        return sources  # in one piece: all is read before anything is written
    return [
        source.clone() if any(_distance(target, source) not in (0, None) for target in targets) else source
        for source in sources
    ]

"""The state of a sharded optimizer as a plain one has it: gathered from all ranks' pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.adapter.guard import collective
from hora.torch._context import Context
from hora.torch._objects import gather_objects
from hora.torch._process_sets import ProcessSet
from hora.torch._wire import as_bytes
from hora.torch.shard._flat import Flat
from hora.torch.shard._moves import start_gather
from hora.torch.shard._pieces import Piece, Pieces

__all__ = ["gather_states"]


@dataclass(frozen=True)
class _Row:
    """Stands for an entry with a number for each element."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Told:
    """What a rank tells of a piece: the buffer, the parameters, and the entries of its state."""

    buffer: int
    members: list[int]
    entries: dict[str, Any]


def gather_states(
    shares: Sequence[tuple[Flat, Pieces]],
    state: Mapping[Any, dict[str, Any]],
    context: Context,
    process_set: ProcessSet,
    *,
    keep: bool,
) -> dict[torch.Tensor, dict[str, Any]]:
    """Parameter -> state. Every rank calls it.

    Args:
        shares: the flat buffers, and the pieces of this rank.
        state: of the pieces.
        context: of the job.
        process_set: who shares.
        keep: whether this rank wants the result; without, it takes part a row at a time.
    """
    with collective(context, "state_dict", process_set=process_set):
        return _gather(shares, state, context, process_set, keep=keep)


def _gather(
    shares: Sequence[tuple[Flat, Pieces]],
    state: Mapping[Any, dict[str, Any]],
    context: Context,
    process_set: ProcessSet,
    *,
    keep: bool,
) -> dict[torch.Tensor, dict[str, Any]]:
    own = [
        _Told(
            number,
            [member.number for member in piece.members],
            _entries(state[piece.parameter], piece, pieces),
        )
        for number, (_, pieces) in enumerate(shares)
        for piece in pieces
        if state.get(piece.parameter)
    ]
    told = [each for several in gather_objects(own, context, process_set=process_set) for each in several]
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    for number, (flat, pieces) in enumerate(shares):
        known = [each for each in told if each.buffer == number]
        kinds = {
            (key, value.dtype)
            for each in known
            for key, value in each.entries.items()
            if isinstance(value, _Row)
        }
        rows = {}
        for kind in sorted(kinds, key=str):
            own_row = _own_row(flat, pieces, state, kind)
            row = _gather_row(flat, own_row, context, process_set)
            if keep:
                rows[kind] = row
        entries = {place: each.entries for each in known for place in each.members}
        for place in sorted(entries) if keep else ():
            member = flat.members[place]
            whole[member.parameter] = {
                key: member.view(rows[key, value.dtype]).clone()
                if isinstance(value, _Row)
                else _copied(value, flat.device)
                for key, value in entries[place].items()
            }
    return whole


def _entries(state: Mapping[str, Any], piece: Piece, pieces: Pieces) -> dict[str, Any]:
    return {
        key: _Row(value.dtype)
        if pieces.is_row(piece, key, value)
        else (value.cpu(), value.device.type == "cpu")
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        tensor, on_cpu = value
        return tensor.clone() if on_cpu else tensor.to(device)
    return value


def _own_row(
    flat: Flat, pieces: Pieces, state: Mapping[Any, dict[str, Any]], kind: tuple[str, torch.dtype]
) -> torch.Tensor:
    """One entry of this rank's chunk."""
    key, dtype = kind
    own = torch.zeros(flat.chunk, dtype=dtype, device=flat.device)
    for piece in pieces:
        value: Any = state.get(piece.parameter, {}).get(key)
        if pieces.is_row(piece, key, value) and value.dtype is dtype:
            own[piece.start - flat.first : piece.stop - flat.first] = value
    return own


def _gather_row(flat: Flat, own: torch.Tensor, context: Context, process_set: ProcessSet) -> torch.Tensor:
    """The same of the whole buffer."""
    row = torch.empty(flat.chunk * flat.size, dtype=own.dtype, device=flat.device)
    number = context.presence.call("state_dict", process_set)
    rank = process_set.rank()
    assert rank is not None, "others do not share"
    chunk = row.view(flat.size, flat.chunk)[rank]
    chunk.copy_(own)
    work = start_gather(as_bytes(row), as_bytes(chunk), process_set.group)
    context.presence.wait(work, row.device, process_set=process_set, number=number, what="state_dict")
    return row

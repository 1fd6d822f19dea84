"""This rank's chunk of a flat buffer as an optimizer sees it: in pieces, as few as it allows.

A piece is a tensor of the optimizer's, so it is all stepped or not, and has one count of steps. Parameters
that have always had a gradient at the same steps may share one. Where they part, the piece is cut in two.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.core.errors import GradientError
from hora.torch.shard._flat import Flat, Member

__all__ = ["Piece", "Pieces"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Neighbouring parameters, as far as they are in this rank's chunk.

    Attributes:
        members: them.
        parameter: the tensor that the optimizer steps: a row of the flat buffer.
        start: where it begins there.
        stop: where it ends.
    """

    members: list[Member]
    parameter: torch.nn.Parameter
    start: int
    stop: int

    @property
    def group(self) -> int:
        return self.members[0].group


class Pieces:
    """The pieces of one flat buffer.

    Args:
        flat: the buffer.
        scalars: entries of the state that are one number for a tensor.
        single: whether a piece is of one parameter only, for an optimizer that asks for norms of those.
    """

    def __init__(self, flat: Flat, scalars: set[str], *, single: bool = False) -> None:
        self._flat = flat
        self._scalars = scalars
        self._single = single
        self._own = [member for member in flat.members if _is_here(member, flat)]
        self._all: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._all)

    def is_row(self, piece: Piece, key: str, value: Any) -> bool:
        """Whether an entry of a piece's state is a number for each element."""
        row = isinstance(value, torch.Tensor) and value.shape == piece.parameter.shape
        return row and key not in self._scalars

    def rebuild(self, states: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """Cut the chunk anew for the state of whole parameters; the state of the pieces.

        Args:
            states: parameter -> state, as a plain optimizer has them.
        """
        kinds = [self._kind(member, states.get(member.parameter)) for member in self._own]
        self._all = self._cut(self._own, kinds)
        made = {}
        for piece in self._all:
            first = states.get(piece.members[0].parameter)
            if first:
                made[piece.parameter] = {
                    key: self._joined(piece, key, states)
                    if self._is_each(value, piece.members[0], key)
                    else copy.deepcopy(value)
                    for key, value in first.items()
                }
        return made

    def split(self, present: Callable[[Member], bool], state: MutableMapping[Any, Any]) -> None:
        """Let each piece be of parameters that all have a gradient in this step, or none of which has."""
        if not any(len({present(member) for member in piece.members}) > 1 for piece in self._all):
            return
        found: list[Piece] = []
        for piece in self._all:
            parts = self._cut(piece.members, [present(member) for member in piece.members])
            if len(parts) == 1:
                found.append(piece)
                continue
            found += parts
            entries = state.pop(piece.parameter, None)
            for part in parts if entries else ():
                span = slice(part.start - piece.start, part.stop - piece.start)
                state[part.parameter] = {
                    key: value[span] if self.is_row(piece, key, value) else copy.deepcopy(value)
                    for key, value in entries.items()
                }
        self._all = found

    def _cut(self, members: Sequence[Member], kinds: Sequence[Hashable]) -> list[Piece]:
        pieces = []
        pairs = zip(members, kinds, strict=True)
        for _, run in itertools.groupby(
            pairs, key=lambda pair: (pair[0].group, pair[1], pair[0].number if self._single else None)
        ):
            together = [member for member, _ in run]
            start = together[0].within(self._flat.first, self._flat.last)[0]
            stop = together[-1].within(self._flat.first, self._flat.last)[1]
            parameter = torch.nn.Parameter(self._flat.values[start:stop])
            pieces.append(Piece(together, parameter, start, stop))
        return pieces

    def _joined(self, piece: Piece, key: str, states: Mapping[Any, dict[str, Any]]) -> torch.Tensor:
        model = states[piece.members[0].parameter][key]
        row = torch.zeros(piece.stop - piece.start, dtype=model.dtype, device=model.device)
        for member in piece.members:
            start, stop = member.within(piece.start, piece.stop)
            line = member.line(states[member.parameter][key])
            row[start - piece.start : stop - piece.start] = line[start - member.start : stop - member.start]
        return row

    def _is_each(self, value: Any, member: Member, key: str) -> bool:
        """Whether an entry of a parameter's state is a number for each element.

        Raises:
            GradientError: one that is neither that nor one number.
        """
        if not isinstance(value, torch.Tensor) or key in self._scalars:
            return False
        if value.shape == member.parameter.shape:
            return True
        if value.numel() == 1:
            return False
        raise GradientError(
            f"The optimizer's state {key!r} of {member.name} has the shape {tuple(value.shape)}, the "
            f"parameter {tuple(member.parameter.shape)}.",
            fix="Load a state of this model's optimizer, or leave out shard='optimizer'.",
        )

    def _kind(self, member: Member, state: dict[str, Any] | None) -> Hashable:
        """Equal for parameters whose state can be one."""
        if not state:
            return None
        return tuple(
            (key, value.dtype, value.device)
            if self._is_each(value, member, key)
            else (key, str(value.tolist()) if isinstance(value, torch.Tensor) else str(value))
            for key, value in state.items()
        )


def _is_here(member: Member, flat: Flat) -> bool:
    """Those without elements are everywhere: they have a count of steps all the same."""
    start, stop = member.within(flat.first, flat.last)
    return stop > start or member.stop == member.start

"""One kind of call of a collective, and how the calls of several ranks differ."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.guard.source import Block

__all__ = ["UNKNOWN", "Call", "block_left", "difference", "passed_over"]

FIELDS = ("collective", "name", "dtype", "shape", "operation", "root", "factors", "items", "process set")
"""What must be equal on all ranks, in the order in which a difference is told."""

REDUCING = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")

REDUCTION = re.compile(r"^torch\.distributed: \w*reduce\w* .*?of (\d+) elements of b?float")
"""A call of torch.distributed itself, in the words of the engine that carries it."""


@dataclass(frozen=True)
class Call:
    """One kind of call, as a rank described it.

    Attributes:
        signature: what must be equal on all ranks, by the names of :data:`FIELDS`.
        text: the call in words.
        where: ``file:line`` of the user's line; None if there is none.
        condition: the condition on the rank under which that line stands, as ``if rank == 0 (file:line)``.
        blocks: what that line is in: its function, and loops and conditions inside, outermost first.
    """

    signature: Mapping[str, Any]
    text: str
    where: str | None = None
    condition: str | None = None
    blocks: Sequence[Block] = ()

    @functools.cached_property
    def key(self) -> str:
        """Equal for calls with an equal signature."""
        return json.dumps(self.signature, sort_keys=True, default=str)

    @property
    def reduces(self) -> bool:
        """Whether it combines floating-point tensors of several elements, as gradients are."""
        direct = REDUCTION.search(self.text)
        if direct is not None:
            return int(direct[1]) > 1
        floating = any("float" in str(dtype) for dtype in self.signature.get("dtype", ()))
        shapes = self.signature.get("shape", ())
        return self.signature.get("collective") in REDUCING and floating and any(map(_is_several, shapes))

    @property
    def site(self) -> str:
        """The call in words, with its line."""
        return f"{self.text} at {self.where}" if self.where else self.text


def _is_several(shape: Sequence[int]) -> bool:
    return math.prod(shape) > 1


UNKNOWN = Call({}, "an unknown collective")


def difference(calls: Sequence[Call]) -> str:
    """Which part of the calls differs, in words."""
    items = [call.signature.get("items") for call in calls]
    if all(isinstance(each, list) for each in items) and any(each != items[0] for each in items):
        return _first_item(items)
    numbers = list(dict.fromkeys(len(call.signature.get("shape") or ()) for call in calls))
    if len(numbers) > 1 and len({call.signature.get("collective") for call in calls}) == 1:
        return f"The number of tensors differs: {' and '.join(map(str, numbers))}."
    for name in FIELDS:
        values = list(dict.fromkeys(_words(call.signature.get(name)) for call in calls))
        if len(values) > 1:
            return f"The {name} differs: {' and '.join(values)}."
    return "They wait for each other."


def passed_over(groups: Sequence[tuple[Call, list[int]]]) -> list[tuple[Call, list[int]]]:
    """The groups whose line stands in a block that all other groups have left, or left out."""
    return [
        group
        for group in groups
        if all(block_left(group[0], other[0]) is not None for other in groups if other is not group)
    ]


def _first_item(lists: Sequence[Any]) -> str:
    other = next(each for each in lists if each != lists[0])
    for place, (one, two) in enumerate(zip(lists[0], other, strict=False)):
        if one != two:
            return f"What they give differs, first at number {place} (from 0): {one} and {two}."
    return f"They give different numbers of them: {len(lists[0])} and {len(other)}."


def _words(value: Any) -> str:
    """``(3, 4)`` for the shapes ``[[3, 4]]``, ``none`` for None."""
    if value is None:
        return "none"
    if isinstance(value, list):
        parts = [str(tuple(part)) if isinstance(part, list) else str(part) for part in value]
        return parts[0] if len(parts) == 1 else f"{len(parts)} tensors, {', '.join(parts[:4])}"
    return str(value)


def block_left(call: Call, other: Call) -> str | None:
    """The block around ``call`` that whoever has come to ``other`` has left, or left out; None: none."""
    file, _, line = (other.where or "").rpartition(":")
    if (
        not call.blocks
        or call.blocks[:1] != other.blocks[:1]
        or not (call.where or "").startswith(f"{file}:")
    ):
        return None
    place, looping = int(line), False
    for first, last, text in call.blocks[1:]:
        if not first <= place <= last:
            return f"`{text}` ({file}:{first})" if place > last or looping else None
        looping = looping or text.startswith(("for ", "while "))
    return None

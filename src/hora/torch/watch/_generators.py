"""The random generators that a data set may use, and whether it has drawn from them.

Ranks, epochs or loader workers that start from the same state, and draw, draw the same.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import IterableDataset

from hora.torch.watch._inputs import FEW, random_state

__all__ = ["Drawn", "drawn", "generators_of", "states"]

OBJECTS = 200
"""Objects of a data set among which generators of its own are looked for."""

DEPTH = 4
WIDTH = 20
"""How far that goes into a list, and into what is in it."""

FOLLOWED = 256
"""Numbers up to which the draws from a generator are counted, where its state does not tell."""

ROUND = 624
"""Numbers that a Mersenne Twister makes at once: Matsumoto and Nishimura, "Mersenne Twister", 1998."""

OWN = "own"
"""The kind of generators that a data set keeps itself."""

Drawn = Mapping[str, str]
"""For each kind of generator that was drawn from, the state from which."""

_GENERATORS = (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)
_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
_LEAVES = (torch.Tensor, numpy.ndarray, str, bytes, int, float, type, ModuleType)


class _State(NamedTuple):
    """A generator's state.

    Attributes:
        kind: "torch", "random" or "numpy" for the global ones, else :data:`OWN`.
        seeded: the part that drawing few numbers does not change, and a new seed does; empty: there is none.
        position: the part that each number changes by one.
        rest: what else there is.
        inner: the state itself, where the others do not tell how many numbers were drawn.
    """

    kind: str
    seeded: str
    position: int
    rest: str = ""
    inner: Any = None

    @property
    def whole(self) -> str:
        return f"{self.seeded} {self.position} {self.rest}"


def states(own: Sequence[Any]) -> list[_State]:
    """The states of the global generators, and of a data set's own."""
    return [
        _torch("torch", random_state()),
        _python("random", random.getstate()),
        _numpy("numpy", numpy.random.get_state(legacy=False)),
        *(_state(generator) for generator in own),
    ]


def drawn(before: Sequence[_State], after: Sequence[_State], *, samples: int) -> dict[str, str]:
    """For each kind of generator from which the noise of so many samples was drawn, its state before.

    A few numbers may be a decision that all take alike, such as the size of a batch's images. Where a sample
    seeds the generator, what is left afterwards belongs to that sample, and tells the two apart.
    """
    found: dict[str, list[str]] = {}
    for old, new in zip(before, after, strict=True):
        if old.whole != new.whole and not _is_few(old, new, max(FEW, samples)):
            found.setdefault(old.kind, []).append(f"{old.whole} {new.seeded}")
    return {kind: _crc(" ".join(parts).encode()) for kind, parts in found.items()}


def generators_of(dataset: Any) -> list[Any]:
    """The generators that a data set keeps itself, or that its methods take from their module.

    Those of a stream are left out: that all shuffle the same before each takes its part is no fault.
    """
    if isinstance(dataset, IterableDataset):
        return []
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(dataset, 0)]
    while waiting and len(seen) < OBJECTS:
        thing, depth = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _GENERATORS):
            found[id(thing)] = thing
        elif depth < DEPTH:
            waiting += [(inner, depth + 1) for inner in _inside(thing)]
    return list(found.values())


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, list | tuple):
        yield from thing[:WIDTH]
    elif isinstance(thing, dict):
        yield from list(thing.values())[:WIDTH]
    elif not isinstance(thing, _LEAVES):
        yield from list(getattr(thing, "__dict__", {}).values())
        functions = [thing, *(getattr(type(thing), name, None) for name in _METHODS)]
        for function in functions:
            if isinstance(function, FunctionType):
                names = function.__code__.co_names
                yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _is_few(old: _State, new: _State, enough: int) -> bool:
    """Whether fewer numbers were drawn, as far as the states tell."""
    if old.seeded:  # a Mersenne Twister, which makes its numbers in rounds
        rounds = 0 if old.seeded == new.seeded else 1
        return new.position - old.position + ROUND * rounds < enough
    if old.inner is None:
        return False
    follower = getattr(numpy.random, old.inner["bit_generator"])()
    follower.state = old.inner
    for _ in range(min(enough, FOLLOWED)):
        if _crc(repr(follower.state["state"]).encode()) == _crc(repr(new.inner["state"]).encode()):
            return True
        follower.random_raw()
    return False


def _state(generator: Any) -> _State:
    if isinstance(generator, torch.Generator):
        raw = generator.get_state().numpy().tobytes()
        if generator.device.type != "cpu":
            return _State(OWN, "", 0, _crc(raw))
        left, position = struct.unpack_from("<i4xQ", raw, 8)
        return _torch(OWN, (_crc(raw[24:]), left, position, 0))
    if isinstance(generator, random.Random):
        return _python(OWN, generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return _numpy(OWN, generator.get_state(legacy=False))
    return _numpy(OWN, generator.bit_generator.state)


def _torch(kind: str, state: tuple[Any, ...]) -> _State:
    keys, left, position, device = state
    return _State(kind, f"{keys} {device}", -left, str(position))


def _python(kind: str, state: tuple[Any, ...]) -> _State:
    *keys, position = state[1]
    # A hash of whole numbers is the same in each process.
    return _State(kind, str(hash(tuple(keys))), position, str(state[2]))


def _numpy(kind: str, state: Any) -> _State:
    inner = state["state"]
    if "key" not in inner:
        return _State(kind, "", 0, _crc(repr(state).encode()), state)
    rest = f"{state.get('has_gauss')} {state.get('gauss')}"
    return _State(kind, _crc(numpy.asarray(inner["key"]).tobytes()), int(inner["pos"]), rest)


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"

"""Random numbers that belong to the sample and the step, not to the rank: what ``hora verify`` tries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hora.adapter.recording.recorder import Recorder

__all__ = ["Draws"]

Draw = Callable[[np.random.Generator, Sequence[int]], NDArray[Any]]


class Draws:
    """The random numbers that one rank draws while it computes on a batch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._at = (0, 0)
        self._turn = 0

    def drawn(self, shape: Sequence[int], draw: Draw) -> NDArray[Any] | None:
        """Numbers for an array with a row per sample, each row drawn under its sample's own seed.

        None where the script's own are to be used: there is no experiment, or the array is none of the batch.

        Args:
            shape: of the array.
            draw: draws numbers of a shape.
        """
        recorder = self._recorder
        if not recorder.active:
            return None
        recorder.uses.add("random numbers")
        keys = recorder.sources.keys(shape[0]) if len(shape) else None
        if "randomness" not in recorder.apply or keys is None:
            return None
        at = (recorder.steps, recorder.passes)
        self._turn = self._turn + 1 if at == self._at else 0
        self._at = at
        rows = [draw(np.random.default_rng(_seed(key, *at, self._turn)), shape[1:]) for key in keys]
        return np.stack(rows) if rows else None


def _seed(*parts: object) -> int:
    text = "\n".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

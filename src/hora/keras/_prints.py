"""Do the ranks still train one model? Fingerprints of its variables for the guard, before the first step of
``fit`` and after some. On JAX ``hora.jax.spmd`` gives them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hora.adapter.frames import at
from hora.keras._backend import BACKEND, api
from hora.keras._optimizer import Distributed

__all__ = ["Prints"]

EVERY = 50
"""After steps 1, 2, 4, 8, 16 and 32 there is a fingerprint every so many steps."""

MOST = 1000
"""Variables that are looked at."""

BLOCKS = 64
"""Parts of a variable whose 64-bit words are added up, at the speed of memory."""

_count = itertools.count()


class Prints:
    """Those of one ``fit``."""

    def __init__(self, model: Any, number: int) -> None:
        optimizer = model.optimizer
        options = optimizer._options
        members = options.process_set.ranks or list(range(api.size()))
        local = options.is_local()
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = {id(each) for each in getattr(inner, "_accumulated_gradients", None) or ()}
        self._reporter = api.context().guard.reporter
        self._key = f"keras {number}"
        self._steps = 0
        self._parameters = [each for each in model.trainable_variables if id(each) not in local][:MOST]
        self._state = [] if local else [each for each in optimizer.variables if id(each) not in own][:MOST]
        self._members = members
        self._model = model

    @classmethod
    def of(cls, model: Any) -> Prints | None:
        """Those of a model, if there is a guard and the ranks train it together."""
        optimizer = getattr(model, "optimizer", None)
        if BACKEND == "jax" or not api.is_initialized() or not isinstance(optimizer, Distributed):
            return None
        if api.size() == 1 or api.context().guard is None:
            return None
        number = next(_count)  # on ranks outside of the process set too, so that all count alike
        options: Any = optimizer._options
        built = model.built and getattr(optimizer, "built", False)
        return cls(model, number) if built and options.process_set.included() else None

    def begin(self) -> None:
        """The training begins with these variables."""
        record = {
            "kind": "replica",
            "members": self._members,
            "distributed": True,
            "broadcast": False,
            "changed": [],
            "seed": None,
            "names": [each.path for each in self._parameters],
            "optimizer": type(self._model.optimizer).__name__,
            "where": at()[0],
            "together": None,
            "stateful": False,
        }
        self._send(record)

    def stepped(self, batches: int) -> None:
        """So many batches more are done."""
        before, self._steps = self._steps, self._steps + batches
        due = [2**power for power in range(6)]
        if any(before < step <= self._steps for step in due) or before // EVERY < self._steps // EVERY:
            self._send(
                {
                    "kind": "print",
                    "step": self._steps,
                    "gradients": [],
                    "written": [],
                    "steered": [],
                    "buffers": None,
                }
            )

    def _send(self, record: dict[str, Any]) -> None:
        rate = float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))
        more = {
            "key": self._key,
            "parameters": _digests(self._parameters),
            "state": _digests(self._state),
            "rates": [{"lr": rate}],
            "restored": [],
        }
        self._reporter.send(record | more)


def _digests(variables: Sequence[Any]) -> list[int]:
    return [_digest(keras.ops.convert_to_numpy(each.value)) for each in variables]


def _digest(array: NDArray[Any]) -> int:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(data) - len(data) % (8 * BLOCKS)
    sums = data[:whole].view(np.uint64).reshape(BLOCKS, -1).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[whole:].tobytes(), zlib.crc32(sums.tobytes()))

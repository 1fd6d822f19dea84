"""The numbers that a script reduces over its ranks, which ``hora verify`` compares too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hora.adapter.frames import line

if TYPE_CHECKING:
    from hora.adapter.recording.recorder import Recorder

__all__ = ["Metrics"]

SUMMED = " (sum)"
"""Behind the place of a sum, which the script may yet divide by the number of workers."""

MOST = 4
"""Elements of an array that may be a metric; larger ones are gradients or parameters."""


class Metrics:
    """Follows the reductions of numbers on one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._weighted = "metric-weights" in recorder.plan.apply
        self._found: list[tuple[str, float, int]] = []
        self._trained = 0

    def trained(self, samples: int) -> None:
        """A pass over so many samples was made."""
        self._trained = samples

    def take(self) -> list[tuple[str, float, int]]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found

    def follow(self, module: Any, *, summed: Callable[[Any, dict[str, Any]], bool]) -> None:
        """Follow ``mean`` and ``allreduce`` of a module that the script calls.

        Args:
            module: the adapter, or its face for Horovod's scripts.
            summed: whether a call of ``allreduce`` with these arguments adds up.
        """
        plain_mean = module.mean
        module.mean = self._mean(plain_mean)
        module.allreduce = self._allreduce(module.allreduce, plain_mean, summed)

    def _mean(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mean(value: Any, weight: Any = 1.0) -> Any:
            place, samples = self._place(), self._samples()
            if not place:
                return original(value, weight)
            result = original(value, samples if self._weighted else weight)
            values = result if isinstance(result, Mapping) else {"": result}
            for name in sorted(values):
                self._note(f"{place} {name}".strip(), values[name], samples)
            return result

        return mean

    def _allreduce(
        self, original: Any, mean: Callable[..., Any], summed: Callable[[Any, dict[str, Any]], bool]
    ) -> Callable[..., Any]:
        def allreduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._place()
            if not place or not _is_metric(tensor):
                return original(tensor, *args, **kwargs)
            samples = self._samples()
            if self._weighted:
                usual = mean(float(samples))
                tensor = tensor * (samples / usual if usual else 1.0)
            result = original(tensor, *args, **kwargs)
            where = place + SUMMED * summed(args, kwargs)
            for value in np.asarray(result, dtype=np.float64).reshape(-1).tolist():
                self._note(where, value, samples)
            return result

        return allreduce

    def _place(self) -> str:
        """``file:line`` of the script, where it calls itself, and not a library."""
        return line() if self._recorder.active else ""

    def _samples(self) -> int:
        """What the number is a mean of: the evaluation's samples since the last one, else the last batch."""
        samples = self._recorder.sources.unused or self._trained
        self._recorder.sources.unused = 0
        return samples

    def _note(self, place: str, value: float, samples: int) -> None:
        self._found.append((place, float(value), samples))


def _is_metric(tensor: Any) -> bool:
    """Whether it is a few numbers that can be looked at now: not so inside a compiled step."""
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None or dtype is None:
        return isinstance(tensor, float)
    try:
        array = np.asarray(tensor)
    except Exception:  # noqa: BLE001 - a tracer of JAX, a symbol of TensorFlow: each has its own error
        return False
    return 0 < array.size <= MOST and array.dtype.kind == "f"

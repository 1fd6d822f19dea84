"""A collective that has been called, as ``torch.distributed`` wants it: a work that can be waited for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from hora.torch.engines._algorithms import Steps

if TYPE_CHECKING:
    from hora.torch.engines._queue import Queue

__all__ = ["DONE", "Operation"]

_FOREVER = timedelta(days=365)


class Operation(dist.Work):
    """A collective that has been called."""

    def __init__(self, queue: Queue, steps: Steps, tensors: Any, what: str, *, place: Any = None) -> None:
        super().__init__()
        self.steps, self.what, self.place = steps, what, place
        self.done, self.number = False, 0
        self.error: BaseException | None = None
        self.waited = 0.0
        self._queue, self._tensors = queue, tensors
        self._future: torch.futures.Future[Any] | None = None
        self._ended: torch.futures.Future[None] | None = None

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait until it has ended.

        Raises:
            RuntimeError: it failed; or it did not end within ``timeout``, and goes on.
        """
        if not self.done:
            with torch.inference_mode(False), _disable_current_modes():  # as in a call
                self._queue.run(self, timeout.total_seconds() if timeout > timedelta() else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._queue.lock_of_futures:
            if self._future is None:
                self._ended = torch.futures.Future()
                # C++ is told of an error by a callback that raises; of `set_exception` it knows nothing.
                self._future = self._ended.then(self._outcome)
            future = self._future
        if self.done:
            self.settle()
        else:
            self._queue.hurry()  # whoever waits for it in C++ cannot help
        return future

    def end(self, error: BaseException | None = None) -> None:
        """It has ended. Whoever calls this calls :meth:`settle` when it holds no lock any more."""
        self._queue._resume(self.place)
        self.steps.close()
        with self._queue.lock_of_futures:
            self.error, self.done = error, True

    def settle(self) -> None:
        """If it has ended, complete its future, whose callbacks may call collectives themselves."""
        with self._queue.lock_of_futures:
            ended = self._ended if self.done else None
            if ended is not None:
                self._ended = None
        if ended is not None:
            ended.set_result(None)

    def _outcome(self, _: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self._tensors


class _Done(dist.Work):
    """What a call that has waited returns."""

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE = _Done()

"""A request under way: the engine's work, and what is left to do when it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hora.torch._context import Context
from hora.torch._request import Request

__all__ = ["Rest", "Running"]

Rest = Callable[[], Any]
"""Makes the result when the engine's work has ended."""


class Running:
    """Work of the engine, and what is left to do afterwards."""

    def __init__(
        self,
        request: Request,
        works: list[dist.Work],
        rest: Rest,
        context: Context,
        *,
        number: int | None,
        began: float,
        place: tuple[int, int] | None,
        started: float,
    ) -> None:
        self._request = request
        self._number = number
        self._works = works
        self._rest: Rest | None = rest
        self._context = context
        self._result: Any = None
        self._began = began
        self._place = place  # among the collectives, for the guard
        self._started = started  # seconds that starting it held up the caller
        context.pending.update(works)

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        if self._rest is not None:
            waits = time.time()
            with self._context.waiting(self._place):
                for work in self._works:
                    self._wait(work)
                    self._context.pending.discard(work)
            self._works = []  # they would keep the engine alive after shutdown()
            with torch.no_grad():
                self._result = self._rest()
            self._rest = None
            _record(self._request, self._context, self._began, waits=waits, started=self._started)
        return self._result

    def _wait(self, work: dist.Work) -> None:
        if self._number is None:
            work.wait()
            return
        request, context = self._request, self._context
        context.presence.wait(
            work,
            request.tensors[0].device if request.tensors else context.control,
            process_set=request.process_set,
            number=self._number,
            what=request.kind.value,
        )


def _record(request: Request, context: Context, began: float, *, waits: float, started: float) -> None:
    """Add it to the timeline, with the seconds at its beginning and its end that the caller stood still."""
    timeline = context.timeline
    if not timeline.enabled:
        return
    now = time.time()
    details: dict[str, Any] = {
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in request.tensors),
        "started": started,
        "waited": now - waits,
    }
    if request.name:
        details["name"] = request.name
    if request.process_set.process_set_id:
        details["process_set"] = request.process_set.process_set_id
    # Horovod's helper thread waits while the script goes on.
    own = not threading.current_thread().name.startswith("hora-")
    lane = "collectives" if own else "background"
    timeline.add(request.kind.value, began, now, lane=lane, details=details)

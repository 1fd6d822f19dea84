"""A request under way: the engine's work, and what is left to do when it has ended."""

from __future__ import annotations

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
    ) -> None:
        self._request = request
        self._number = number
        self._works = works
        self._rest: Rest | None = rest
        self._context = context
        self._result: Any = None
        self._began = began
        context.pending.update(works)

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        if self._rest is not None:
            for work in self._works:
                self._wait(work)
                self._context.pending.discard(work)
            self._works = []  # they would keep the engine alive after shutdown()
            with torch.no_grad():
                self._result = self._rest()
            self._rest = None
            _record(self._request, self._context, self._began)
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


def _record(request: Request, context: Context, began: float) -> None:
    timeline = context.timeline
    if timeline.enabled:
        size = sum(tensor.numel() * tensor.element_size() for tensor in request.tensors)
        details: dict[str, Any] = {"bytes": size} | ({"name": request.name} if request.name else {})
        timeline.add(request.kind.value, began, time.time(), lane="collectives", details=details)

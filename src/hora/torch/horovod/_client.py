"""PyTorch's part of the negotiation: requests of tensors, run on a group that is the executor's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.negotiation import client
from hora.adapter.negotiation.client import Pending
from hora.adapter.negotiation.match import Ask, Key
from hora.torch._context import Context
from hora.torch._execute import execute
from hora.torch._process_sets import global_process_set
from hora.torch._request import Request
from hora.torch.horovod._translate import describe, run_together, zeros

__all__ = ["Client", "Pending"]


class Client(client.Client):
    """The dispatcher of the negotiated mode.

    Args:
        context: the job.
        group: of all ranks, used by the executor alone.
        connections: control and alarm; see :class:`hora.adapter.negotiation.client.Client`.
        others: see there.
    """

    def __init__(self, context: Context, group: dist.ProcessGroup, *connections: Any, **others: Any) -> None:
        self._job = context
        self._group = group
        self._cuda = context.device.type == "cuda"
        super().__init__(context, *connections, **others)

    def submit(self, request: Request) -> Pending:
        """Ask for an operation; see :meth:`hora.adapter.negotiation.client.Client.ask`."""
        set_id = request.process_set.process_set_id
        assert set_id is not None
        request.scaled_apart = True
        if request.process_set is global_process_set:
            request.own_group = self._group
        kind = f"grouped_{request.kind.value}" if request.grouped else request.kind.value
        ready = None
        if self._cuda and any(tensor.is_cuda for tensor in request.tensors):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return self.ask(kind, request.name, set_id, request, describe(request), ready=ready)

    def begin(self) -> None:
        """The executor's operations are on this rank's GPU."""
        if self._cuda:
            torch.cuda.set_device(self._job.device)

    def carry_out(self, works: Sequence[Pending], rows: Sequence[Any]) -> list[Any]:
        """Run the requests, several as one."""
        for work in works:
            if work.ready is not None:
                torch.cuda.current_stream().wait_event(work.ready)
        requests: list[Request] = [work.request for work in works]
        try:
            if len(works) > 1:
                return run_together(requests)
            requests[0].rows = works[0].rows = rows[0]
            return [execute(requests[0])]
        finally:
            if self._cuda:
                torch.cuda.current_stream().synchronize()

    def stand_in(self, key: Key, ask: Ask) -> Request:
        """Zeros."""
        return zeros(key, ask, self._job, own_group=self._group)

"""The guard sees the collectives that a script, or DDP, calls through ``torch.distributed`` itself.

Only the shared-memory engine tells of them; Gloo and NCCL have no place for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hora.adapter.frames import at, user_site
from hora.adapter.guard import inside
from hora.adapter.ops import refuse_presentation
from hora.core.errors import VerdictError
from hora.guard.board import Phase
from hora.guard.call import Call

if TYPE_CHECKING:
    from hora.torch._guard import Guard

__all__ = ["Calls"]


class Calls:
    """Enters the calls of one group on the guard's board.

    Args:
        guard: what reports to the supervisor.
        set_id: the group's process set.
        members: the ranks of that.
    """

    def __init__(self, guard: Guard, set_id: int, members: Sequence[int]) -> None:
        self._guard, self._set_id, self._members = guard, set_id, members
        self._stalled: tuple[int, int] | None = None

    def enter(self, what: str) -> tuple[int, int] | None:
        """Note a call, unless one of Hora's own collectives makes it."""
        if inside():
            return None
        refuse_presentation()
        site = user_site(2)
        text = f"torch.distributed: {what}"

        def describe() -> Call:
            return Call({"collective": text, "process set": self._members}, text, *at())

        key = (what, self._set_id, site)
        return self._guard.reporter.enter(key, describe, set_id=self._set_id, members=self._members)

    def stalled(self, place: tuple[int, int]) -> None:
        """Show that this rank waits: only now, as most waits are short."""
        if self._stalled != place:
            self._stalled = place
            self._guard.reporter.slot.phase(Phase.WAITING, *place, time.monotonic())

    def resumed(self, place: tuple[int, int]) -> None:
        if self._stalled == place:
            self._stalled = None
            self._guard.reporter.slot.phase(Phase.RUNNING, *place, time.monotonic())

    def explain(self, error: Exception) -> Any:
        return error if isinstance(error, VerdictError) else self._guard.reporter.explain(error)

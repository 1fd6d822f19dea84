"""Work that only some ranks do, declared so that nobody takes it for a hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar

from hora.adapter.current import Current
from hora.core.errors import UsageError

__all__ = ["only"]


class only:  # noqa: N801 - read as a statement: with hora.only(0):
    """Declare that only some ranks do what follows, however long it takes.

    Use it as a block, on those ranks or on all of them::

        if hora.rank() == 0:
            with hora.only(0, reason="evaluation"):
                evaluate(model)

        with hora.only(0, reason="evaluation") as mine:
            if mine:
                evaluate(model)

    While a rank is inside, others that wait for it are not called hung, and ``HORA_TIMEOUT`` does not
    apply to them. A collective inside raises, as the other ranks are not there to take part. Without the
    guard (see ``docs/guide/guard.md``) it changes nothing.

    Args:
        ranks: the ranks that do it; several, or sequences of them. None given: the rank that enters.
        reason: what they do, for messages.

    Raises:
        UsageError: a rank that is not of this job.
    """

    current: ClassVar[Current[Any]]

    def __init__(self, *ranks: int | Iterable[int], reason: str = "work of its own") -> None:
        context = self.current.required("only")
        size = context.world.size
        flat = [one for given in ranks for one in ([given] if isinstance(given, int) else given)]
        for one in flat:
            if not isinstance(one, int) or not 0 <= one < size:
                raise UsageError(
                    f"hora.only({one!r}): that is not a rank of this job (0 to {size - 1}).",
                    fix="Write hora.only(0, reason='evaluation').",
                )
        self._mine = not flat or context.world.rank in flat
        self._reason = reason
        self._guard = context.guard
        self._stack = contextlib.ExitStack()

    def __bool__(self) -> bool:
        """Whether this rank is one of them."""
        return self._mine

    def __enter__(self) -> bool:
        if self._mine and self._guard is not None:
            self._stack.enter_context(self._guard.reporter.alone(self._reason))
        return self._mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

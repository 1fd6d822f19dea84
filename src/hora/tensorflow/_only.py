"""Work that only some ranks do, declared so that nobody takes it for a hang."""

from __future__ import annotations

from hora.adapter import only as shared
from hora.tensorflow._context import current

__all__ = ["only"]


class only(shared.only):  # noqa: N801 - read as a statement: with hora.only(0):
    __doc__ = shared.only.__doc__

    current = current

"""What Horovod's operations raise in TensorFlow: TensorFlow's errors, which are also Horovod's own here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.adapter.negotiation.errors import HorovodInternalError
from hora.core.errors import CollectiveError

__all__ = ["FailedPreconditionError", "InvalidArgumentError", "LostError", "UnsupportedError"]


class FailedPreconditionError(tf.errors.FailedPreconditionError, HorovodInternalError):  # type: ignore[misc]
    """The ranks ask for different things."""

    def __init__(self, text: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)


class LostError(tf.errors.UnknownError, HorovodInternalError):  # type: ignore[misc]
    """A rank has ended."""

    echo = True

    def __init__(self, text: str) -> None:
        tf.errors.UnknownError.__init__(self, None, None, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)


class InvalidArgumentError(CollectiveError, tf.errors.InvalidArgumentError, HorovodInternalError):  # type: ignore[misc]
    """An operation was given something that it cannot take."""

    slug = "collective"

    def __init__(self, what: str, *, fix: str) -> None:
        CollectiveError.__init__(self, what, fix=fix)
        self._node_def = None
        self._op = None
        self._message = str(self)
        self._error_code = tf.errors.INVALID_ARGUMENT

    def __str__(self) -> str:
        return CollectiveError.__str__(self)


class UnsupportedError(InvalidArgumentError, NotImplementedError):
    """An operation was asked for what it is not defined for."""

    slug = "collective"

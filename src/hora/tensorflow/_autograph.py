"""AutoGraph, which ``tf.function`` applies to all Python code that it traces, has nothing to do in Hora."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

__all__ = ["unconverted"]

F = TypeVar("F", bound=Callable[..., Any])


def unconverted(function: F) -> F:
    """The function, which runs as it is written while a graph is traced.

    Otherwise AutoGraph rewrites it and all that it calls, which takes ten times as long as tracing itself.
    """
    return cast("F", tf.autograph.experimental.do_not_convert(function))

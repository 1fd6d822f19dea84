"""``horovod.tensorflow.util``: the helpers that scripts use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["refs_to_vars", "vars_to_refs"]

_has_eager = True
_cache = functools.cache


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Any:
    return tf.function(function)


def vars_to_refs(variables: Any) -> Any:
    """Hashable references to variables."""
    return tuple(variable.ref() for variable in variables)


def refs_to_vars(references: Any) -> list[Any]:
    """The variables of references."""
    return [reference.deref() for reference in references]

"""Which backend Keras runs on, and the adapter whose engine moves its bytes.

Only that one is imported: ``hora.torch``, ``hora.tensorflow`` or ``hora.jax``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hora.core.errors import MissingExtraError, UsageError

__all__ = ["BACKEND", "Adapter", "api", "engine"]

try:
    import keras
except ImportError as error:
    raise MissingExtraError(
        f"hora.keras needs Keras 3, which cannot be imported: {error}",
        fix="Run: pip install 'hora[keras]', with hora[torch], hora[tensorflow] or hora[jax] beside it.",
    ) from error

Adapter = Any
"""A module with Hora's vocabulary: it has no type of its own, and the three differ in what tensors are."""

BACKEND: str = keras.backend.backend()
"""``"torch"``, ``"tensorflow"`` or ``"jax"``."""


def _chosen() -> tuple[Adapter, ModuleType]:
    if BACKEND not in ("torch", "tensorflow", "jax"):
        raise UsageError(
            f"Keras runs on the backend {BACKEND!r}, which cannot train.",
            fix="Set KERAS_BACKEND to torch, tensorflow or jax before Python starts.",
        )
    return importlib.import_module(f"hora.{BACKEND}"), importlib.import_module(f"hora.keras._{BACKEND}")


api, engine = _chosen()

"""Hora: distributed training from one worker to a thousand.

The framework adapters are imported by name, so that each brings only its own framework:
``import hora.torch as hora``. This package itself holds what needs no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hora.core.version import VERSION as __version__

if TYPE_CHECKING:
    from hora.core.errors import HoraError, JobFailedError
    from hora.launch import run

__all__ = ["HoraError", "JobFailedError", "__version__", "run"]


def __getattr__(name: str) -> Any:
    # Lazy: `hora --help` must not pay for the launcher.
    if name == "run":
        return importlib.import_module("hora.launch").run
    if name in ("HoraError", "JobFailedError"):
        return getattr(importlib.import_module("hora.core.errors"), name)
    hint = "" if name.startswith("__") else "; for PyTorch write: import hora.torch as hora"
    raise AttributeError(f"module 'hora' has no attribute {name!r}{hint}")

"""Hora: distributed training from one worker to a thousand.

The framework adapters are imported by name, so that each brings only its own framework:
``import hora.torch as hora``. This package itself holds what needs no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hora.launch import run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    # Lazy: `hora --help` must not pay for the launcher.
    if name == "run":
        from hora.launch import run

        return run
    raise AttributeError(f"module 'hora' has no attribute {name!r}")

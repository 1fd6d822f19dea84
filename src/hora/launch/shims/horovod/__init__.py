"""What ``import horovod`` gives under ``hora run --horovod``: Hora, in Horovod's words."""

from __future__ import annotations

from typing import Any

__version__ = "0.28.1"
"""The release of Horovod whose interface this is."""

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from hora.launch.horovod import run_function

        return run_function
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")

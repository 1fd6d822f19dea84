"""``horovod.runner``: calling a function on new workers."""

from __future__ import annotations

from hora.launch.horovod import run_function as run

__all__ = ["run"]

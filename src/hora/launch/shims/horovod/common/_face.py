"""Which framework's interface the modules without a framework's name speak for."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["face"]


def face() -> Any:
    """The interface that the script has imported; PyTorch's if there is none yet."""
    found = [name for name in ("torch", "tensorflow") if f"hora.{name}.horovod" in sys.modules]
    return importlib.import_module(f"hora.{found[0] if found else 'torch'}.horovod")

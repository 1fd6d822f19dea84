"""torchvision's operations, where it is installed. Hora does not need it: it has the same ones in PyTorch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["torchvision_ops"]


@functools.cache
def torchvision_ops() -> Any:
    """The module ``torchvision.ops``, or None where torchvision is not installed."""
    try:
        return importlib.import_module("torchvision.ops")
    except ModuleNotFoundError:
        return None

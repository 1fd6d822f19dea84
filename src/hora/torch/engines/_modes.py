"""What a script has switched on for its own tensors and must not reach the engine's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["undisturbed"]

_COMPILERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())

Method = TypeVar("Method", bound=Callable[..., Any])


def undisturbed(method: Method) -> Method:
    """What is made in inference mode can be written there only, but a collective may end anywhere.

    Modes that watch or replace tensor operations have nothing to do with the engine's own. Those of torch's
    compiler (fake tensors, tracing, functionalization) have to do with the call itself: they get it as an
    operation of torch's own group, which moves no bytes under fake tensors and is recorded in a trace.
    """
    name = method.__name__

    @functools.wraps(method)
    def wrapper(*args: Any, **named: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            if any(torch._C._get_dispatch_mode(key) is not None for key in _COMPILERS):
                return getattr(args[0].ordinary, name)(*args[1:], **named)
            with _disable_current_modes():
                return wrapper(*args, **named)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return method(*args, **named)
        return method(*args, **named)

    return wrapper  # type: ignore[return-value]

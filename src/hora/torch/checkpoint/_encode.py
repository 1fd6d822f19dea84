"""State as JSON: numbers, texts and containers, with a name in the place of each tensor.

JSON cannot run code, whatever is in it, so nothing of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from hora.core.errors import CheckpointError

__all__ = ["Keep", "decode", "encode"]

Keep = Callable[[str, torch.Tensor], dict[str, Any]]
"""Takes in a tensor under a name, and gives what stands in its place: a dict with the key "tensor"."""

_PLAIN = (bool, int, str)


def encode(path: str, value: Any, keep: Keep) -> Any:
    """A value as JSON holds it.

    Args:
        path: where it is, for the names of tensors and for messages: ``schedule/milestones``.
        value: None, numbers, texts, bytes, tensors, numpy arrays and generators' states, and lists, tuples,
            sets and dicts of such.
        keep: see :data:`Keep`.

    Raises:
        CheckpointError: something else.
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return keep(path, value)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"array": keep(path, torch.from_numpy(value.copy()))}
    if isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        return encode(path, value.item(), keep)
    if isinstance(value, collections.Counter | collections.OrderedDict) or kind is dict:
        name = (
            "counter" if isinstance(value, collections.Counter) else "ordered" if kind is not dict else "dict"
        )
        return {
            name: [
                [encode(path, key, keep), encode(f"{path}/{key}", entry, keep)]
                for key, entry in value.items()
            ]
        }
    if kind in (tuple, torch.Size):
        return {"tuple": [encode(f"{path}/{place}", entry, keep) for place, entry in enumerate(value)]}
    if kind is list:
        return [encode(f"{path}/{place}", entry, keep) for place, entry in enumerate(value)]
    if kind in (set, frozenset):
        return {
            "set": [
                encode(f"{path}/{place}", entry, keep) for place, entry in enumerate(sorted(value, key=repr))
            ]
        }
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [encode(path, value.real, keep), encode(path, value.imag, keep)]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    raise CheckpointError(
        f"{path} is of the class {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold: to "
        "be read back it would have to run code.",
        fix="Let state_dict() give numbers, texts, tensors, and lists and dicts of them.",
    )


def decode(value: Any, tensor: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The value that :func:`encode` was given.

    Args:
        value: its result.
        tensor: gives the tensor for what stands in its place.

    Raises:
        ValueError: something that ``encode`` does not write.
    """
    if isinstance(value, list):
        return [decode(entry, tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value)
    if len(value) != 1:
        raise ValueError(f"{sorted(value)} in the values of a checkpoint")
    ((kind, inner),) = value.items()
    if kind not in _DECODE:
        raise ValueError(f"{kind!r} in the values of a checkpoint")
    if kind in ("float", "bytes", "dtype", "device"):
        return _DECODE[kind](inner)
    if kind == "array":
        return tensor(inner).numpy()
    return _DECODE[kind]([decode(entry, tensor) for entry in inner])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")  # noqa: TRY004 - it is a text in a file
    return found


_DECODE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "dtype": _dtype,
    "device": torch.device,
    "array": lambda inner: inner,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
    "complex": lambda parts: complex(*parts),
}

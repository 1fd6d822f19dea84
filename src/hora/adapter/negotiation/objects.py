"""Objects as bytes, for ``broadcast_object`` and ``allgather_object`` on negotiated operations."""

from __future__ import annotations

import pickle
from typing import Any

from hora.adapter.negotiation.errors import HorovodInternalError
from hora.core.errors import CollectiveError

__all__ = ["part", "pickled", "refusal"]


def part(name: str | None, of: str) -> str | None:
    """The name of one of the operations of which an exchange consists."""
    return None if name is None else f"{name}.{of}"


def pickled(obj: Any) -> bytes:
    """The object by cloudpickle, where it is installed, or pickle.

    No bytes at all when it has no pickle: they are sent nevertheless, so that nobody waits for them, and each
    rank makes its :func:`refusal` of them.
    """
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        data: bytes = pickler.dumps(obj)
    except Exception as error:  # noqa: BLE001 - whatever the object's own methods raise
        # The other ranks hear of it as an empty message; this rank says what it was.
        print(f"hora: the object of this rank cannot be pickled: {type(error).__name__}: {error}", flush=True)
        return b""
    return data


def refusal(rank: int) -> HorovodInternalError:
    """The error, on all ranks, of an object that cannot be pickled."""
    error = HorovodInternalError(f"The object of rank {rank} cannot be pickled.")
    error.__cause__ = CollectiveError(
        f"The object of rank {rank} cannot be pickled.",
        fix="Send plain data: numbers, texts, lists, dicts, numpy arrays, tensors.",
    )
    return error

"""The random streams of a rank: torch's on the CPU and on its own GPU, numpy's, and Python's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

__all__ = ["derive", "set_streams", "streams"]


def streams(device: torch.device) -> dict[str, Any]:
    """Where they are."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(name),
            numpy.asarray(keys).astype(numpy.int64),
            *(int(rest[0]), int(rest[1]), float(rest[2])),
        ],
        "python": random.getstate(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_streams(found: Mapping[str, Any], device: torch.device) -> None:
    """Go on from there."""
    torch.set_rng_state(found["torch"].to(torch.uint8))
    name, keys, *rest = found["numpy"]
    numpy.random.set_state((name, numpy.asarray(keys).astype(numpy.uint32), *rest))
    random.setstate(found["python"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"].to(torch.uint8), device)


def derive(found: Mapping[str, Any], *, step: int, rank: int) -> None:
    """Begin new streams, a function of the saved one of rank 0, the step and this rank.

    On another number of workers each saved stream would have to be cut or shared, and shared streams are
    equal noise on several ranks.
    """
    state = found["torch"].numpy().tobytes()
    digest = hashlib.sha256(state + f"/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # the GPU's too
    numpy.random.seed(list(digest[8:24]))
    random.seed(digest)

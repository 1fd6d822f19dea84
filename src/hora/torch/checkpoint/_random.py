"""The random streams of a rank: torch's on the CPU and on its own GPU, numpy's, and Python's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

__all__ = ["derive", "digests", "set_streams", "streams"]


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
    if device.type == "cuda" and "cuda" in found:  # else it was saved on a CPU
        torch.cuda.set_rng_state(found["cuda"].to(torch.uint8), device)


def digests(device: torch.device) -> list[str]:
    """One text for each kind of stream, equal where the streams are."""
    here = streams(device)
    _, keys, *rest = here["numpy"]
    parts = (
        here["torch"].numpy().tobytes(),
        keys.tobytes() + repr(rest).encode(),
        repr(here["python"]).encode(),
    )
    return [hashlib.sha256(part).hexdigest() for part in parts]


def derive(
    found: Mapping[str, Any], device: torch.device, *, step: int, rank: int, alike: Sequence[bool]
) -> None:
    """Go on from rank 0's streams on another number of workers.

    A stream that the script has seeded alike on all ranks is for decisions that they share, and stays alike.
    Any other begins anew, as a function of the saved one, the step and the rank: a copy would be equal noise
    on several ranks.

    Args:
        found: rank 0's streams.
        device: of this rank.
        step: of the checkpoint.
        rank: this one.
        alike: of torch's, numpy's and Python's stream, whether it is alike on all ranks now.
    """
    state = found["torch"].numpy().tobytes()
    digest = hashlib.sha256(state + f"/{step}/{rank}".encode()).digest()
    set_streams(found, device)
    if not alike[0]:
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # the GPU's too
    if not alike[1]:
        numpy.random.seed(list(digest[8:24]))
    if not alike[2]:
        random.seed(digest)

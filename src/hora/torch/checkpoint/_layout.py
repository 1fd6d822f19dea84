"""``layout.json``: which tensor lies in which file, as :mod:`torch.distributed.checkpoint` knows it.

DCP keeps its :class:`Metadata` as a pickle, which runs code when it is read. This is the same as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hora.core.commits import Commit, DamagedError

__all__ = ["LAYOUT", "Span", "dump", "parse", "rank_files"]

LAYOUT = "layout.json"
LARGEST = 2**62


@dataclass(frozen=True)
class Span:
    """Where a chunk lies: ``length`` bytes from ``offset`` on, in row-major order."""

    file: str
    offset: int
    length: int


def rank_files(rank: int) -> tuple[str, str]:
    """The names of a rank's files: its tensors, and its other values."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def dump(metadata: Metadata, *, world: int) -> bytes:
    """The layout as it is written."""
    spans: Mapping[MetadataIndex, Span] = metadata.storage_data
    tensors = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(entry, TensorStorageMetadata), "all else is among the values"
        chunks = []
        for chunk in entry.chunks:
            span = spans[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), span.file, span.offset, span.length])
        tensors[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": chunks,
        }
    return json.dumps({"world": world, "tensors": tensors}, indent=None, separators=(",", ":")).encode()


def parse(data: bytes, commit: Commit) -> Metadata:
    """The layout that was written.

    Raises:
        DamagedError: it is none, or not that of the marker.
    """
    try:
        record = json.loads(data)
        world = record["world"]
        entries: dict[str, Any] = {}
        spans: dict[MetadataIndex, Span] = {}
        for name, told in record["tensors"].items():
            entries[name] = _tensor(name, told, commit, spans)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its {LAYOUT} cannot be used: {error}") from None
    if world != commit.world:
        raise DamagedError(f"its {LAYOUT} is of {world} workers, its marker of {commit.world}")
    for rank in range(commit.world):
        for name in rank_files(rank):
            if name not in commit.files:
                raise DamagedError(f"it is of {commit.world} workers, and {name} is not among its files")
    return Metadata(state_dict_metadata=entries, storage_data=spans)


def _tensor(
    name: str, told: Mapping[str, Any], commit: Commit, spans: dict[MetadataIndex, Span]
) -> TensorStorageMetadata:
    dtype = getattr(torch, told["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{told['dtype']!r} is not a dtype")
    shape = _sizes(told["shape"])
    chunks, held = [], 0
    for offsets, sizes, file, offset, length in told["chunks"]:
        chunk = ChunkStorageMetadata(torch.Size(_sizes(offsets)), torch.Size(_sizes(sizes)))
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"a chunk of {name} has other dimensions")
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {name} is outside it")
        if length != math.prod(chunk.sizes) * dtype.itemsize:
            raise ValueError(f"a chunk of {name} has {length} bytes")
        if not 0 <= offset <= offset + length <= commit.files[file][0]:
            raise ValueError(f"a chunk of {name} is outside {file}")
        held += math.prod(chunk.sizes)
        chunks.append(chunk)
        spans[MetadataIndex(name, chunk.offsets)] = Span(file, offset, length)
    if held != math.prod(shape):
        raise ValueError(f"{name} has {math.prod(shape)} elements, of which {held} are there")
    properties = TensorProperties(dtype=dtype)
    return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _sizes(told: Any) -> list[int]:
    if not all(type(each) is int and 0 <= each < LARGEST for each in told):
        raise ValueError(f"{told!r} is no shape")
    return list(told)

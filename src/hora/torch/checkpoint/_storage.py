"""What :mod:`torch.distributed.checkpoint` calls storage: where a plan's chunks lie, and how they are read.

A rank's tensors lie in one buffer, which is at once the copy that training goes on beside and the file, byte
for byte. The file is in the safetensors format: a header in JSON, and the bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hora.core.commits import BLOCK
from hora.torch.checkpoint._layout import Span

__all__ = ["RankFile", "Reader", "spans_of", "write_file"]

ALIGNMENT = 64
"""Bytes at which each tensor begins: a cache line."""

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names in the safetensors format; tensors of other dtypes are called bytes there."""


@dataclass(frozen=True)
class RankFile:
    """The file of one rank's plan.

    Attributes:
        name: of the file.
        header: its first bytes.
        spans: place of each chunk.
        size: bytes of the whole file.
    """

    name: str
    header: bytes
    spans: dict[MetadataIndex, Span]
    size: int


def spans_of(plan: SavePlan, name: str) -> RankFile:
    """Lay a plan out as a file."""
    entries: dict[str, Any] = {}
    places: list[tuple[MetadataIndex, int, int]] = []
    end = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "plans hold tensors only"
        dtype, shape = data.properties.dtype, list(data.chunk.sizes)
        length = data.chunk.sizes.numel() * dtype.itemsize
        # The safetensors format wants no gaps, so what fills them is named too.
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if start > end:
            entries[f"fill-{end}"] = {"dtype": "U8", "shape": [start - end], "data_offsets": [end, start]}
        end = start + length
        key = item.index.fqn
        if data.chunk.sizes != data.size:
            key += f"[{','.join(map(str, data.chunk.offsets))}]"
        code = _CODES.get(dtype)
        entries[key] = {
            "dtype": code or "U8",
            "shape": shape if code else [length],
            "data_offsets": [start, end],
        }
        places.append((item.index, start, length))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    spans = {index: Span(name, len(header) + start, length) for index, start, length in places}
    return RankFile(name, header, spans, len(header) + end)


def write_file(path: Path, data: Any) -> tuple[int, str]:
    """Write a new file and bring it to the disk; its size, and its SHA-256 in hexadecimal.

    Hashing and writing take turns block by block, while these are in the processor's cache, and let other
    threads run.

    Raises:
        OSError: it cannot be written.
    """
    digest, view = hashlib.sha256(), memoryview(data).cast("B")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            digest.update(block)
            while block:
                block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return len(view), digest.hexdigest()


class Reader(StorageReader):
    """Reads a checkpoint of Hora for ``torch.distributed.checkpoint.load``; it unpickles nothing.

    Args:
        folder: of the checkpoint.
        metadata: its layout.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__()
        self._folder = folder
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's protocol: a reader is of one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The layout."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Part of DCP's protocol: nothing is left to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        Raises:
            OSError: a file is gone or shorter than it was when it was verified.
        """
        spans: dict[MetadataIndex, Span] = self._metadata.storage_data
        entries: Any = self._metadata.state_dict_metadata
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR, "all else is among the values"
            files.setdefault(spans[item.storage_index].file, []).append(item)
        for name, items in files.items():
            items.sort(key=lambda item: spans[item.storage_index].offset)
            with (self._folder / name).open("rb", buffering=0) as file:
                last: tuple[Any, torch.Tensor] | None = None
                for item in items:
                    index = item.storage_index
                    if last is None or last[0] != index:
                        entry = entries[index.fqn]
                        chunk = next(one for one in entry.chunks if one.offsets == index.offset)
                        last = index, _read(file, spans[index], entry.properties.dtype, chunk.sizes)
                    part = last[1]
                    for dim, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        part = part.narrow(dim, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Part of DCP's protocol."""
        return Path(checkpoint_id).is_dir()


def _read(file: io.RawIOBase, span: Span, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    raw = torch.empty(span.length, dtype=torch.uint8)
    view = memoryview(cast("Any", raw.numpy())) if span.length else memoryview(b"")
    file.seek(span.offset)
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{span.file} ends inside a tensor")
        view = view[count:]
    return raw.view(dtype).view(tuple(sizes))

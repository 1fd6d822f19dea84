"""Compares two checkpoints, entry by entry."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hora.core import commits
from hora.torch.checkpoint.export import export

__all__ = ["differences"]


def differences(one: Path, other: Path, *, tolerance: float) -> tuple[list[str], int]:
    """What differs between two checkpoints, random streams left out.

    Args:
        one: folder of the expected one.
        other: of the one that is judged.
        tolerance: largest difference relative to the largest element of the tensor; 0.0: every bit.

    Returns:
        A sentence for each entry that differs, and how many tensors there are.
    """
    expected, found = dict(_entries("", _read(one))), dict(_entries("", _read(other)))
    told = [f"{name} is not in the last checkpoint" for name in expected if name not in found]
    told += [
        f"{name} is in the last checkpoint, and not undisturbed" for name in found if name not in expected
    ]
    for name, value in expected.items():
        if name in found and (difference := _difference(value, found[name], tolerance)) is not None:
            told.append(f"{name} of the last checkpoint differs: {difference}")
    return told, sum(isinstance(value, torch.Tensor) for value in expected.values())


def _read(folder: Path) -> Any:
    place = commits.place_at(folder)
    assert place is not None, "a folder that commits.places() has found"
    with tempfile.TemporaryDirectory(prefix="hora-chaos-") as scratch:
        file = export([place], output=Path(scratch) / "state.pt", form="pt", key="all")
        return torch.load(file, weights_only=True, map_location="cpu")


def _entries(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values by where they are: ``optimizer/state/0.weight/momentum_buffer``."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        yield path.lstrip("/"), value
        return
    for key, entry in pairs:
        yield from _entries(f"{path}/{key}", entry)


def _difference(one: Any, other: Any, tolerance: float) -> str | None:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {tuple(one.shape)} undisturbed, {other.dtype} {tuple(other.shape)} disturbed"
        if torch.equal(one, other):
            return None
        if not (one.is_floating_point() or one.is_complex()):
            return f"{int((one != other).sum())} of {one.numel()} elements"
        largest = float(one.double().abs().max() if not one.is_complex() else one.abs().max())
        apart = float((one - other).abs().max())
        if math.isfinite(apart) and apart <= tolerance * largest:
            return None
        if bool((one.isnan() == other.isnan()).all()) and torch.equal(one.nan_to_num(), other.nan_to_num()):
            return None
        return f"by up to {apart:.1g} where the largest element is {largest:.1g}"
    if isinstance(one, float) and isinstance(other, float):
        near = one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))
        return (
            None
            if near or (math.isnan(one) and math.isnan(other))
            else f"{one} undisturbed, {other} disturbed"
        )
    return None if type(one) is type(other) and one == other else f"{one!r} undisturbed, {other!r} disturbed"

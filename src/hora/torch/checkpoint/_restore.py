"""Restoring: the newest checkpoint that is whole, verified by all ranks together."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_planned

from hora.core import commits
from hora.core.commits import Commit, DamagedError, Place
from hora.core.errors import CheckpointError
from hora.torch._context import Context
from hora.torch._objects import gather_objects, send_object
from hora.torch.checkpoint import _layout
from hora.torch.checkpoint._collect import RANDOM, Values, fill
from hora.torch.checkpoint._random import derive, digests, set_streams
from hora.torch.checkpoint._storage import Reader

__all__ = ["Found", "metadata_of", "newest", "put_back", "values_of"]


class Found:
    """What is in a directory.

    Attributes:
        place: the newest good checkpoint; None: there is none.
        commit: its marker.
        damaged: folders that have a marker and are not good, with the reason.
        unfinished: folders without a marker.
    """

    def __init__(self) -> None:
        self.place: Place | None = None
        self.commit: Commit | None = None
        self.damaged: dict[Path, str] = {}
        self.unfinished: list[Path] = []


def newest(directory: Path, context: Context, say: Callable[[Place, str], None]) -> Found:
    """Look for the newest good checkpoint. Every rank calls it, and finds the same.

    Args:
        directory: where.
        context: of the job.
        say: told, in rank 0, of each checkpoint that is passed over.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found, rank, size = Found(), context.world.rank, context.world.size
    places = _agreed(functools.partial(commits.places, directory), context)
    if isinstance(places, str):
        raise CheckpointError(
            f"Checkpoints in {directory} cannot be looked for: {places}.",
            fix="Choose a directory that you may read: hora run --checkpoints DIR.",
        )
    for place in places:
        commit = _agreed(functools.partial(commits.read, place), context)
        problem = commit if isinstance(commit, str) else None
        if problem is None:
            mine = commits.problem_of(place.path, commit, sorted(commit.files)[rank::size])
            told = gather_objects(mine, context)
            problem = next((each for each in told if each is not None), None)
        if problem is None:
            made = _agreed(functools.partial(_checked, place.path, commit), context)
            problem = made if isinstance(made, str) else None
        if problem is None:
            found.place, found.commit = place, commit
            return found
        if (place.path / commits.MARKER).exists():
            found.damaged[place.path] = problem
        else:
            found.unfinished.append(place.path)
        if rank == 0:
            say(place, problem)
    return found


def put_back(state: Any, place: Place, commit: Commit, context: Context) -> None:
    """Put a good checkpoint into the objects.

    Raises:
        CheckpointError: the objects are not those that were saved.
    """
    rank, same = context.world.rank, context.world.size == commit.world
    own = rank if same else 0
    metadata = metadata_of(place.path, commit)
    saved = Values(
        mine=values_of(place.path, own),
        others=lambda: [values_of(place.path, each) for each in range(commit.world)],
        load=lambda targets: load(place.path, metadata, targets),
        new=lambda name: empty(metadata, name),
    )
    told = [] if same else gather_objects(digests(context.device), context)
    random = fill(state, saved, rank=own)
    if same:
        set_streams(random, context.device)
    else:
        alike = [len(set(kind)) == 1 for kind in zip(*told, strict=True)]
        derive(random, context.device, step=place.step, rank=rank, alike=alike)


def metadata_of(folder: Path, commit: Commit) -> Metadata:
    """The layout of a checkpoint.

    Raises:
        DamagedError: there is none that can be used.
    """
    try:
        data = (folder / _layout.LAYOUT).read_bytes()
    except OSError as error:
        raise DamagedError(f"{_layout.LAYOUT} cannot be read: {error.strerror or error}") from None
    return _layout.parse(data, commit)


def values_of(folder: Path, rank: int) -> Mapping[str, Any]:
    """All but the tensors of a rank."""
    name = _layout.rank_files(rank)[1]
    try:
        values = json.loads((folder / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name} of {folder} is not what Hora writes: {error}.",
            fix="Take one that `hora.save` has written.",
        ) from None
    if not isinstance(values, dict) or RANDOM not in values:
        raise CheckpointError(
            f"{name} of {folder} is not what Hora writes.", fix="Take one that `hora.save` has written."
        )
    return values


def empty(metadata: Metadata, name: str) -> torch.Tensor:
    """A tensor for what was saved under a name."""
    entry: Any = metadata.state_dict_metadata.get(name)
    if entry is None:
        raise CheckpointError(
            f"The checkpoint has no tensor {name}.", fix="Give the objects that were saved."
        )
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def load(folder: Path, metadata: Metadata, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place, each with what was saved under its name.

    Raises:
        CheckpointError: one that has another shape.
    """
    for name, target in targets.items():
        saved: Any = metadata.state_dict_metadata.get(name)
        if saved is None or saved.size != target.shape:
            there = "nothing" if saved is None else f"the shape {tuple(saved.size)}"
            raise CheckpointError(
                f"{name} has {there} in the checkpoint, and the shape {tuple(target.shape)} here.",
                fix="Build the model as it was when the checkpoint was written.",
            )
    if not targets:
        return
    with warnings.catch_warnings(), torch.no_grad():
        # It warns that each rank reads for itself, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load_planned(dict(targets), storage_reader=Reader(folder, metadata), planner=planner, no_dist=True)


def _checked(folder: Path, commit: Commit) -> None:
    metadata_of(folder, commit)


def _agreed(look: Callable[[], Any], context: Context) -> Any:
    """What rank 0 finds, or as a text why it found nothing."""
    answer: Any = None
    if context.world.rank == 0:
        try:
            answer = look()
        except DamagedError as error:
            answer = str(error)
        except OSError as error:
            answer = error.strerror or str(error)
    return send_object(answer, 0, context)

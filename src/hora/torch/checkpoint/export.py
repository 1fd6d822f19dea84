"""Take a checkpoint out as one file that other programs read: a plain ``state_dict``, or safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from hora.core import commits
from hora.core.commits import Commit, DamagedError, Place
from hora.core.errors import CheckpointError, MissingExtraError
from hora.torch.checkpoint import _restore
from hora.torch.checkpoint._collect import RANDOM, own_name
from hora.torch.checkpoint._encode import decode

__all__ = ["export"]

Form = Literal["pt", "safetensors"]


def export(
    places: Sequence[Place],
    *,
    output: Path | None = None,
    form: Form | None = None,
    key: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the newest good one of some checkpoints as a file; needs no job.

    Args:
        places: folders, newest first.
        output: the file, which must not exist; None: ``<key>-<step>.<form>`` in the working directory.
        form: ``"pt"``: ``torch.load(file, weights_only=True)`` reads it; ``"safetensors"``: tensors only.
        key: name of the object in the state; None: the only module; ``"all"``: everything, by name.
        say: told of each checkpoint that is passed over.

    Returns:
        The file.

    Raises:
        CheckpointError: there is no good one, no such object, or the file exists.
        MissingExtraError: safetensors is not installed.
    """
    if form is None:
        form = "safetensors" if output is not None and output.suffix == ".safetensors" else "pt"
    place, commit = _newest(places, say)
    values = _restore.values_of(place.path, 0)
    key = _only_module(values) if key is None else key
    state = _state(place, commit, values, key)
    path = Path(f"{key}-{place.step}.{form}") if output is None else output
    if path.exists():
        raise CheckpointError(f"{path} exists already.", fix="Choose another name with --output FILE.")
    if form == "pt":
        torch.save(state, path)
        return path
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtraError(
            "safetensors is not installed.", fix="Write: pip install 'hora[safetensors]'"
        ) from error
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    left = sorted(set(state) - set(tensors))
    if not tensors or key == "all":
        raise CheckpointError(
            f"{key!r} is not a flat set of tensors, which is all that safetensors holds.",
            fix="Choose a module with --key NAME, or --format pt.",
        )
    if left:
        say(f"left out, as they are no tensors: {', '.join(left)}")
    # The format knows neither strides nor tensors that share memory.
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path, {"format": "pt"})
    return path


def _newest(places: Sequence[Place], say: Callable[[str], None]) -> tuple[Place, Commit]:
    for place in places:
        try:
            commit = commits.read(place)
            problem = commits.problem_of(place.path, commit)
        except (DamagedError, OSError) as error:
            problem = str(error)
        if problem is None:
            return place, commit
        say(f"{place.path.name} is passed over: {problem}")
    raise CheckpointError(
        "There is no checkpoint that is whole.", fix="`hora checkpoint check DIR` tells what is there."
    )


def _only_module(values: Mapping[str, Any]) -> str:
    modules = [key for key, entry in values.items() if key != RANDOM and entry["kind"] == "module"]
    if len(modules) == 1:
        return modules[0]
    raise CheckpointError(
        f"The checkpoint has {len(modules)} modules: {', '.join(modules) or 'none'}.",
        fix="Choose one with --key NAME, or all of it with --key all.",
    )


def _state(place: Place, commit: Commit, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    keys = [each for each in values if each != RANDOM]
    if key != "all" and key not in keys:
        raise CheckpointError(
            f"The checkpoint has no {key!r}; it has {', '.join(keys)}.", fix="Choose one of these with --key."
        )
    metadata = _restore.metadata_of(place.path, commit)
    targets: dict[str, torch.Tensor] = {}

    def read(told: Mapping[str, Any]) -> torch.Tensor:
        name = own_name(told["tensor"], 0) if told["own"] else told["tensor"]
        if name not in targets:
            targets[name] = _restore.empty(metadata, name)
        tensor = targets[name]
        return tensor.as_strided(told["shape"], told["stride"]) if "stride" in told else tensor

    made = {
        each: _object(place, commit, each, values[each], read) for each in (keys if key == "all" else [key])
    }
    _restore.load(place.path, metadata, targets)
    return made if key == "all" else _flat(key, made[key])


def _flat(key: str, value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {key: value}


def _object(
    place: Place, commit: Commit, key: str, entry: Mapping[str, Any], read: Callable[[Any], torch.Tensor]
) -> Any:
    tree = entry["tree"]
    if entry["kind"] == "module":
        return {name: decode(told, read) for name, told in tree.items()}
    if entry["kind"] != "optimizer":
        return decode(tree, read)
    ranks = range(commit.world) if tree["spread"] else [0]
    state: dict[str, Any] = {}
    for rank in ranks:
        told = _restore.values_of(place.path, rank)[key]["tree"]["state"]
        for name, entries in told.items():
            if name not in state:
                state[name] = {each: decode(value, read) for each, value in entries.items()}
    groups = [{**decode(group["rest"], read), "params": group["params"]} for group in tree["groups"]]
    return {"state": state, "param_groups": groups}

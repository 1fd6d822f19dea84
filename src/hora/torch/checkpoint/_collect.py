"""The objects of a training as tensors with names, and other values; and back again.

A tensor that all ranks hold alike (parameters, the optimizer's state, and whatever is large) is written
once, by one of them. Small others (running statistics, random streams, counters) each rank writes for itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hora.core.errors import CheckpointError
from hora.torch.checkpoint import _optimizers
from hora.torch.checkpoint._encode import decode, encode
from hora.torch.checkpoint._random import streams

__all__ = ["RANDOM", "Collected", "Values", "collect", "fill", "own_name", "plain_module"]

RANDOM = "random streams"
"""Key of the random streams, beside those that the user chose."""

LARGEST_OWN = 2**20
"""Bytes up to which a tensor that is no parameter and of no optimizer is written by each rank."""


@dataclass
class Collected:
    """What a rank has to save.

    Attributes:
        tensors: name -> tensor, ``DTensor`` or part of a line; they are the objects' own, not copies.
        values: all else, as JSON holds it.
        optimizers: those among the objects.
        kept_until_step: names of the tensors that only a step of these changes.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    kept_until_step: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)

    def text(self) -> bytes:
        """The values as they are written."""
        return json.dumps(self.values, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Values:
    """What was saved besides tensors, when it is restored.

    Attributes:
        mine: this rank's values, or rank 0's where the number of workers is another.
        others: all ranks' values; read only where a sharded optimizer's have to be put together.
        load: fills tensors: name -> where to, in place.
        new: makes an empty tensor for a name.
    """

    mine: Mapping[str, Any]
    others: Callable[[], list[Mapping[str, Any]]]
    load: Callable[[Mapping[str, torch.Tensor]], None]
    new: Callable[[str], torch.Tensor]


def own_name(name: str, rank: int) -> str:
    """The name under which a rank's own tensor is saved."""
    return f"{name}@{rank}"


def collect(state: Mapping[str, Any], *, rank: int, device: torch.device) -> Collected:
    """Take in all objects.

    Raises:
        CheckpointError: one that a checkpoint cannot hold.
    """
    found = Collected()
    names = _optimizers.names_of(state)
    for key, value in state.items():
        if not isinstance(key, str) or not key or key == RANDOM or "@" in key or "/" in key:
            raise CheckpointError(
                f"{key!r} cannot name an object in a checkpoint.",
                fix='Name it by a plain word: {"model": model, "optimizer": optimizer}.',
            )
        found.values[key] = _collected(key, value, found, names, rank)
    found.values[RANDOM] = encode(RANDOM, streams(device), _keeper(found, rank))
    return found


def _collected(key: str, value: Any, found: Collected, names: Mapping[int, str], rank: int) -> dict[str, Any]:
    if isinstance(value, torch.nn.Module):
        module = plain_module(value)
        shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        tree = {
            name: encode(f"{key}/{name}", entry, _keeper(found, rank, shared=name in shared))
            for name, entry in module.state_dict().items()
        }
        return {"kind": "module", "tree": tree}
    if isinstance(value, Optimizer):
        tree = _optimizers.collect(key, value, names, _keeper(found, rank, shared=True), found)
        found.optimizers.append(value)
        return {"kind": "optimizer", "tree": tree}
    if isinstance(value, torch.Generator):
        return {"kind": "generator", "tree": encode(key, value.get_state(), _keeper(found, rank))}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {"kind": "object", "tree": encode(key, value.state_dict(), _keeper(found, rank))}
    return {"kind": "value", "tree": encode(key, value, _keeper(found, rank))}


def _keeper(
    found: Collected, rank: int, *, shared: bool = False
) -> Callable[[str, torch.Tensor], dict[str, Any]]:
    def keep(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                f"{path} is a tensor of layout {tensor.layout} on {tensor.device}, which a checkpoint does "
                "not hold.",
                fix="Give a dense tensor: tensor.to_dense().",
            )
        own = not shared and not hasattr(tensor, "full_tensor") and tensor.nbytes <= LARGEST_OWN
        name = own_name(path, rank) if own else path
        if name in found.tensors:
            raise CheckpointError(
                f"Two tensors have the name {path}.", fix="Rename one of the objects in the state."
            )
        found.tensors[name] = tensor.detach()
        return {"tensor": path, "own": own}

    return keep


def fill(state: Any, saved: Values, *, rank: int) -> Any:
    """Put what was saved into the objects, in place; returns the random streams that were saved.

    Nothing is changed before everything is known to fit.

    Args:
        state: the mapping that was given to ``restore``; plain values are replaced in it.
        saved: what was saved.
        rank: this rank, or 0 where the number of workers is another.

    Raises:
        CheckpointError: the objects are not those that were saved.
    """
    targets: dict[str, torch.Tensor] = {}
    try:
        actions, random = _actions(state, saved, targets, rank)
    except _MALFORMED as error:
        raise CheckpointError(
            f"The checkpoint holds what Hora does not write ({type(error).__name__}: {error}).",
            fix="Take one that `hora.save` has written.",
        ) from error
    saved.load(targets)
    for action in actions:
        action()
    return random


_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, RuntimeError)
"""What comes of values that are read as they were not written."""


def _actions(
    state: Any, saved: Values, targets: dict[str, torch.Tensor], rank: int
) -> tuple[list[Callable[[], Any]], Any]:
    """What puts the values into the objects when the targets are filled; and the random streams."""
    _check_keys(state, saved.mine)
    names = _optimizers.names_of(state)

    def read(told: Mapping[str, Any], like: torch.Tensor | None = None) -> torch.Tensor:
        name = own_name(told["tensor"], rank) if told["own"] else told["tensor"]
        if name not in targets:
            new = saved.new(name)
            if like is not None and new.shape == like.shape:
                # Fused steps go through memory, so state has to lie there as its parameter does.
                new = torch.empty_like(like, dtype=new.dtype, device=new.device, requires_grad=False)
            targets[name] = new
        return targets[name]

    actions: list[Callable[[], Any]] = []
    for key, value in state.items():
        entry = saved.mine[key]
        if entry["kind"] != _kind_of(value):
            raise CheckpointError(
                f"The checkpoint has a {entry['kind']} under {key!r}, the state a {_kind_of(value)}.",
                fix="Give the objects by the names under which they were saved.",
            )
        if isinstance(value, torch.nn.Module):
            actions.append(
                _module(key, plain_module(value), entry["tree"], targets=targets, read=read, rank=rank)
            )
        elif isinstance(value, Optimizer):
            spread = entry["tree"]["spread"]
            trees = [one[key]["tree"] for one in saved.others()] if spread else [entry["tree"]]
            loaded = _optimizers.loaded(key, value, names, trees, read)
            actions.append(functools.partial(value.load_state_dict, loaded))
        else:
            actions.append(functools.partial(_set, state, key, value, decode(entry["tree"], read)))
    return actions, decode(saved.mine[RANDOM], read)


def _set(state: Any, key: str, value: Any, new: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(new)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(new)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(new)
    elif isinstance(state, MutableMapping):
        state[key] = new
    else:
        raise CheckpointError(
            f"{key!r} cannot be restored in a {type(state).__name__}.",
            fix="Give the state as a dict: plain values are replaced in it.",
        )


def plain_module(module: torch.nn.Module) -> torch.nn.Module:
    """A compiled module's own one, whose names do not tell that it is compiled."""
    return getattr(module, "_orig_mod", module)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, torch.Generator):
        return "generator"
    return "object" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def _module(
    key: str,
    module: torch.nn.Module,
    tree: Mapping[str, Any],
    *,
    targets: dict[str, torch.Tensor],
    read: Callable[[Mapping[str, Any]], torch.Tensor],
    rank: int,
) -> Callable[[], Any]:
    here = module.state_dict()
    missing, more = sorted(set(here) - set(tree)), sorted(set(tree) - set(here))
    if missing or more:
        what = f"lacks {_some(missing)}" if missing else f"has {_some(more)} besides"
        raise CheckpointError(
            f"The checkpoint is of another model: of what {key!r} has, it {what}.",
            fix="Build the model as it was when the checkpoint was written.",
        )
    extra: dict[str, Any] = {}
    for name, told in tree.items():
        if isinstance(here[name], torch.Tensor) and isinstance(told, dict) and "tensor" in told:
            targets[own_name(told["tensor"], rank) if told["own"] else told["tensor"]] = here[name]
        else:
            extra[name] = decode(told, read)
    return functools.partial(module.load_state_dict, here | extra) if extra else lambda: None


def _check_keys(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    there = set(saved) - {RANDOM}
    if set(state) != there:
        raise CheckpointError(
            f"The state has {_some(sorted(state))}, the checkpoint {_some(sorted(there))}.",
            fix="Give the same objects, by the same names, to save and to restore.",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"

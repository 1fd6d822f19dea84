"""Looks for trainable parameters that the loss reaches and no optimizer holds."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from hora.torch.watch._group import is_plain

if TYPE_CHECKING:
    from hora.torch.watch._group import Group
    from hora.torch.watch._watch import Watch

__all__ = ["LeftOut"]

FIRST = 2
"""The step after which is looked first; then after twice as many, and later after each :data:`PERIOD`."""

PERIOD = 200
"""Steps between two looks: walking through the modules of a ResNet-50 takes half a millisecond."""

SHOWN = 50
"""Names that are reported."""


@dataclass(frozen=True)
class _Suspect:
    parameter: weakref.ref[torch.Tensor]
    written: int
    step: int


class LeftOut:
    """Looks at the modules that are trained, at some steps.

    A parameter is left out when two looks in a row find that it has a gradient, that it was not written to
    in between, and that it has never been in an optimizer.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._whole: list[tuple[weakref.ref[torch.nn.Module], Group]] = []
        self._broadcast: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._held: Any = WeakTensorKeyDictionary()
        self._unseen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._suspects: dict[int, _Suspect] = {}
        self._next = FIRST
        self._told = False

    def whole(self, module: torch.nn.Module, group: Group) -> None:
        """All trainable parameters of this module are in this optimizer, by its maker's check."""
        self._whole.append((weakref.ref(module), group))

    def broadcast(self, module: torch.nn.Module) -> None:
        """The user has made this module equal on all ranks."""
        self._broadcast.add(module)

    def hold(self, parameters: Sequence[torch.Tensor]) -> None:
        """These are, or were, in an optimizer."""
        for parameter in parameters:
            self._held[parameter] = True

    def after_step(self, group: Group) -> None:
        """After a step of any optimizer."""
        step = self._watch.step
        if step < self._next or self._told:
            return
        self._next = 2 * step if step < 8 else step + PERIOD
        owned = self._owned()
        found = {id(p): (name, p, known) for name, p, known in self._candidates(owned, group)}
        before, self._suspects = self._suspects, {}
        certain: list[tuple[str, torch.Tensor, Group]] = []
        since = step
        for key, (name, parameter, known) in found.items():
            suspect = before.get(key)
            if suspect is None or suspect.parameter() is not parameter:
                suspect = _Suspect(weakref.ref(parameter), parameter._version, step)
            elif suspect.written == parameter._version:
                since = min(since, suspect.step)
                certain.append((name, parameter, known))
            self._suspects[key] = _Suspect(suspect.parameter, parameter._version, suspect.step)
        if certain:
            self._find_unseen()
            owned = self._owned()
            certain = [one for one in certain if id(one[1]) not in owned]
        if certain:
            self._tell(certain, since)

    # --- what is trained, and by whom -----------------------------------------------------------

    def _owned(self) -> set[int]:
        optimizers = itertools.chain(list(self._watch.groups), list(self._unseen))
        return {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _find_unseen(self) -> None:
        """Optimizers that have made no step yet. It takes a while, so it is done on suspicion only."""
        for thing in gc.get_objects():
            # Asked of the type: deprecated objects of torch warn when their attributes are looked up.
            if issubclass(type(thing), Optimizer):
                self._unseen.add(thing)

    def _candidates(self, owned: set[int], group: Group) -> Iterator[tuple[str, torch.Tensor, Group]]:
        whole = [(module, known) for reference, known in self._whole if (module := reference()) is not None]
        for module, known in whole:
            yield from ((name, p, known) for name, p in self._outside(module, owned))
        others = {*self._broadcast, *self._watch.inputs.roots()}.difference(module for module, _ in whole)
        for module in others:
            outside = dict(self._outside(module, owned))
            if outside and self._is_forgotten(module, outside, owned):
                yield from ((name, p, group) for name, p in outside.items())

    def _outside(self, module: torch.nn.Module, owned: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module.named_parameters():
            if (
                parameter.requires_grad
                and parameter.grad is not None
                and id(parameter) not in owned
                and is_plain(parameter)
                and parameter not in self._held
            ):
                yield name if "." in name else f"{name} of {type(module).__name__}", parameter

    def _is_forgotten(
        self, module: torch.nn.Module, outside: Mapping[str, torch.Tensor], owned: set[int]
    ) -> bool:
        """Whether what lies outside was forgotten, in a module whose optimizer was made of a choice.

        Who trains only a new head, adapters or a prompt may leave the large rest unfrozen. A small part at
        the output is another matter, and so is a module of its own that was broadcast to be trained.
        """
        named = list(module.named_parameters())
        held = [index for index, (_, parameter) in enumerate(named) if id(parameter) in owned]
        if not held:
            return module in self._broadcast and module.training
        left = {id(parameter) for parameter in outside.values()}
        first = next(index for index, (_, parameter) in enumerate(named) if id(parameter) in left)
        inside = sum(named[index][1].numel() for index in held)
        return first > held[-1] and sum(parameter.numel() for parameter in outside.values()) < inside

    # --- what it sends --------------------------------------------------------------------------

    def _tell(self, certain: Sequence[tuple[str, torch.Tensor, Group]], since: int) -> None:
        self._told = True
        self._suspects.clear()
        group = certain[0][2]
        self._watch.reporter.send(
            {
                "kind": "left-out",
                "key": group.key,
                "members": group.members,
                "where": group.where,
                "since": since,
                "step": self._watch.step,
                "count": len(certain),
                "names": [name for name, _, _ in certain[:SHOWN]],
            }
        )

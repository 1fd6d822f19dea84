"""In which order do gradients become ready? Recorded in a training's first backward.

Buckets should hold gradients that become ready together, in the order in which they do, which need not be
how a module registers its parameters. All ranks must send the same buckets in the same order, so they
agree on one: each parameter's place is the sum of its places on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Readiness"]

Named = tuple[str, torch.Tensor]


class Readiness:
    """The order of one optimizer's gradients.

    Attributes:
        known: whether the ranks have agreed on it.
    """

    def __init__(self) -> None:
        self.known = False
        self._seen: dict[int, int] = {}
        self._places: dict[int, float] = {}
        self._hooks: dict[int, Any] = {}

    def watch(self, named: Sequence[Named]) -> None:
        """Note when the gradients of these become ready first, until the ranks have agreed."""
        for _, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._hooks and not self.known:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[id(parameter)] = register(_recorder(self._seen))

    def stop(self) -> None:
        """Note nothing any more."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def agree(self, named: Sequence[Named], add_up: Callable[[Sequence[float]], Sequence[float]]) -> None:
        """Find out the order of all ranks; if none has had a gradient yet, it stays unknown.

        Args:
            named: names and parameters, the same on all ranks.
            add_up: sums numbers over the ranks.
        """
        last = len(named)
        own = [float(self._seen.get(id(parameter), last)) for _, parameter in named]
        *places, ranks = add_up([*own, float(bool(self._seen))])
        if ranks:
            self.known = True
            self._places = {id(parameter): place for (_, parameter), place in zip(named, places, strict=True)}
            self.stop()

    def place(self, parameter: torch.Tensor) -> float:
        """Smaller for what is ready earlier; what had no gradient then, or came later, is last."""
        return self._places.get(id(parameter), float("inf"))

    def sort(self, named: Sequence[Named]) -> list[Named]:
        """The parameters from the one that is ready last to the first; in order of registration at first.

        Those without a difference stay as they are: backward goes from the last registered to the first.
        """
        return sorted(named, key=lambda entry: -self.place(entry[1]))


def _recorder(seen: dict[int, int]) -> Callable[[torch.Tensor], None]:
    """What autograd calls; parameters outlive optimizers, so it holds nothing else."""

    def record(parameter: torch.Tensor) -> None:
        seen.setdefault(id(parameter), len(seen))

    return record

"""Parameters whose gradients travel together: the argument ``groups`` of ``DistributedOptimizer``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch

from hora.core.errors import GradientError

__all__ = ["Groups", "even_parts"]

Part = TypeVar("Part")
Named = tuple[str, torch.Tensor]


class Groups:
    """Which parameters share a bucket.

    Args:
        num_groups: used where ``groups`` is None, as in Horovod.
        groups: a number of groups of about equally many parameters (0 for none), or lists of parameters.

    Raises:
        GradientError: what is neither, a negative number, or a parameter that is listed twice.
    """

    def __init__(
        self, num_groups: int = 0, groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    ) -> None:
        self._count = 0
        self._listed: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id is only good while its tensor lives
        _check_count("num_groups", num_groups)
        if groups is None:
            self._count = num_groups
        elif isinstance(groups, int):
            _check_count("groups", groups)
            self._count = groups
        else:
            self._take(groups)

    def numbers(self, named: Sequence[Named]) -> dict[int, int]:
        """``id`` of each parameter that is in a group -> number of the group."""
        if not self._count:
            return self._listed
        parts = even_parts(named, self._count)
        return {id(parameter): number for number, part in enumerate(parts) for _, parameter in part}

    def check_known(self, named: Sequence[Named]) -> None:
        """Raise GradientError for a listed parameter that the optimizer does not have."""
        known = {id(parameter) for _, parameter in named}
        for parameter in self._kept:
            if id(parameter) not in known:
                raise GradientError(
                    f"groups: group {self._listed[id(parameter)]} holds a tensor of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of the optimizer.",
                    fix="List parameters of this optimizer only; those in no group are reduced in buckets.",
                )

    def _take(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        if not _is_list(groups) or not all(
            _is_list(group) and all(isinstance(member, torch.Tensor) for member in group) for group in groups
        ):
            raise GradientError(
                f"groups={groups!r} is neither a number of 0 or more nor a list of lists of parameters.",
                fix="Write groups=[list(model.encoder.parameters()), list(model.head.parameters())].",
            )
        for number, group in enumerate(groups):
            for parameter in group:
                if id(parameter) in self._listed:
                    raise GradientError(
                        f"groups: a parameter of shape {tuple(parameter.shape)} is in group "
                        f"{self._listed[id(parameter)]} and again in group {number}.",
                        fix="List each parameter once.",
                    )
                self._listed[id(parameter)] = number
                self._kept.append(parameter)


def even_parts(items: Sequence[Part], count: int) -> list[Sequence[Part]]:
    """Neighbours in ``count`` parts of about equally many; the first ones get one more, none is empty."""
    count = min(count, len(items))
    if count == 0:
        return []
    share, extra = divmod(len(items), count)
    ends = [share * number + min(number, extra) for number in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def _check_count(argument: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise GradientError(
            f"{argument}={count!r} is not a number of groups.",
            fix=f"Write {argument}=4 for four groups, or leave it out: gradients travel in buckets anyway.",
        )


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)

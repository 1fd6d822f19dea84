"""Parameters of one dtype and device in one flat buffer, cut into as many equal chunks as there are ranks.

Each rank updates its chunk, wherever the cuts fall, so that the ranks have equal shares of the optimizer's
state however unequal the parameters are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hora.core.errors import GradientError
from hora.torch import _buckets
from hora.torch.shard._memory import flat_buffer

__all__ = ["Flat", "Member", "spread"]

Named = tuple[str, torch.Tensor]

WASTE = 100
"""Chunks start at cache lines if that adds less than one in so many elements."""


@dataclass(frozen=True)
class Member:
    """A parameter and its place in the flat buffer.

    Attributes:
        number: among those of the buffer.
        group: number of its parameter group.
        start: where it begins; its elements are in the order in which its memory has them.
        stop: where it ends.
        stride: the parameter's own.
    """

    name: str
    parameter: torch.Tensor
    number: int
    group: int
    start: int
    stop: int
    stride: tuple[int, ...]

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The part of it that lies between two places of the buffer; empty: both are equal."""
        start = min(max(self.start, first), last)
        return start, max(start, min(self.stop, last))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a buffer of this layout, in the parameter's shape."""
        offset = flat.storage_offset() + self.start
        return flat.as_strided(self.parameter.shape, self.stride, offset)

    def line(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape as a row, in the order of the buffer."""
        if tensor.stride() != self.stride and tensor.numel() > 1:
            ordered = torch.empty_strided(
                self.parameter.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = ordered.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Flat:
    """The parameters, which become views of the buffer.

    Args:
        named: names and parameters, with the number of the parameter group of each.
        rank: this worker's among those that share.
        size: how many share.

    Attributes:
        chunk: elements of each rank's share.
        first: where this rank's begins.
        last: where it ends.
        values: the buffer.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor, int]], *, rank: int, size: int) -> None:
        model = named[0][1]
        self.dtype, self.device, self.size = model.dtype, model.device, size
        aligned = max(_buckets.ALIGNMENT // model.element_size(), 1)
        self.members: list[Member] = []
        end = 0
        for name, parameter, group in named:
            if parameter.numel() >= _buckets.SMALL:
                end = -(-end // aligned) * aligned
            # Of a tensor with gaps or overlaps, empty_like has the plain strides.
            stride = torch.empty_like(parameter, device="meta").stride()
            self.members.append(
                Member(name, parameter, len(self.members), group, end, end + parameter.numel(), stride)
            )
            end += parameter.numel()
        chunk = -(-end // size)
        rounded = -(-chunk // aligned) * aligned
        self.chunk = rounded if (rounded - chunk) * WASTE < chunk else chunk
        self.first, self.last = rank * self.chunk, (rank + 1) * self.chunk
        self.values = flat_buffer(self.chunk * size, self.dtype, self.device)
        self._views = [member.view(self.values) for member in self.members]
        self.take_in()

    def take_in(self) -> None:
        """Bring into the buffer what is not, or not any more, a view of it (``parameter.data = ...``).

        Raises:
            GradientError: a parameter that has become one of another dtype, device or shape.
        """
        with torch.no_grad():
            for member, view in zip(self.members, self._views, strict=True):
                parameter = member.parameter
                if parameter.data_ptr() == view.data_ptr() and parameter.dtype is self.dtype:
                    continue
                if parameter.dtype is not self.dtype or parameter.device != self.device:
                    raise GradientError(
                        f"{member.name} has become {parameter.dtype} on {parameter.device} since "
                        f"DistributedOptimizer took it as {self.dtype} on {self.device} (shard='optimizer').",
                        fix="Convert and move the model first (model.to(...)), and make the optimizer then.",
                    )
                view.copy_(parameter)
                parameter.data = view

    def touched(self) -> None:
        """Tell autograd that the parameters have changed, as it sees in a plain optimizer."""
        torch.autograd.graph.increment_version([member.parameter for member in self.members])

    @property
    def wire(self) -> torch.Tensor:
        """The whole buffer, as it travels."""
        return torch.view_as_real(self.values) if self.dtype.is_complex else self.values

    @property
    def own(self) -> torch.Tensor:
        """This rank's chunk of ``wire``."""
        return self.wire[self.first : self.last]


def spread(
    named: Sequence[Named], groups: dict[int, int], *, bucket_mb: float, together: dict[int, int]
) -> Iterator[list[tuple[str, torch.Tensor, int]]]:
    """Spread parameters over buffers, in the order in which backward makes their gradients.

    Those that are frozen by now have buffers of their own, which do not travel while they are. Inside a
    buffer the parameters of a group lie side by side, so that an optimizer sees few tensors.

    Args:
        named: names and parameters, in order of registration.
        groups: ``id`` of a parameter -> number of its parameter group.
        bucket_mb: size of a buffer.
        together: ``id`` of a parameter -> number of those that share one buffer, whatever its size.
    """
    filling: dict[object, tuple[list[Named], int]] = {}
    closed: list[tuple[int, list[Named]]] = []
    position: dict[int, int] = {}
    for place, (name, parameter) in enumerate(reversed(named)):
        position[id(parameter)] = place
        number = together.get(id(parameter))
        key = (parameter.dtype, parameter.device, number, parameter.requires_grad)
        members, used = filling.get(key, ([], 0))
        members.append((name, parameter))
        used += parameter.numel() * parameter.element_size()
        limit = bucket_mb if closed else min(_buckets.FIRST_BUCKET_MB, bucket_mb)
        if number is None and used >= limit * 2**20:
            closed.append((place, members))
            members, used = [], 0
        filling[key] = (members, used)
    closed += [(position[id(members[-1][1])], members) for members, _ in filling.values() if members]
    for _, members in sorted(closed, key=lambda entry: entry[0]):
        ordered = sorted(
            ((name, parameter, groups[id(parameter)]) for name, parameter in members),
            key=lambda entry: (entry[2], entry[1].numel() >= _buckets.SMALL),
        )
        yield ordered

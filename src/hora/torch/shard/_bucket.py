"""The gradients of one flat buffer on their way: summed over the ranks, each of which receives its chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hora.core.errors import GradientError
from hora.torch import _buckets
from hora.torch.shard._flat import Flat, Member
from hora.torch.shard._gradient import GradientShare
from hora.torch.shard._memory import flat_buffer

if TYPE_CHECKING:
    from hora.torch.shard._across import Across

__all__ = ["ShardBucket"]

Piece = tuple[torch.Tensor, int, int]
"""A row of the buffer that is sent, and which elements of a run of parameters go there."""


class ShardBucket:
    """Takes the place of a ``Bucket`` in the cycles of a reducer.

    What is sent to each rank is its chunk of the gradients, and behind it a copy of the presence flags and
    marks (see ``Bucket``): so each rank gets the sums of its chunk and of all flags in one message. While
    that is on its way, ``grad`` of each parameter is None; afterwards it is a ``GradientShare``.

    Args:
        flat: the parameters.
        across: asks the other ranks about their parts.

    Attributes:
        shares: of each parameter, what its ``grad`` becomes.
        waiting, label, work, started, place, seated, entered: as in ``Bucket``.
    """

    def __init__(self, flat: Flat, across: Across) -> None:
        self.label = ""
        self.flat = flat
        self._across = across
        self.names = [member.name for member in flat.members]
        self.parameters = [member.parameter for member in flat.members]
        self.shares = [GradientShare(self, member) for member in flat.members]
        self.waiting: set[int] = set()
        self.work: Any = None
        self.started = 0.0
        self.place: tuple[int, int] | None = None
        row = flat.chunk + len(self.parameters) + 2
        self.seated = False
        self.entered: tuple[Any, tuple[int, int]] | None = None
        self._received = flat_buffer(row, flat.dtype, flat.device)
        self._before: torch.Tensor | None = None  # only where backward passes add up
        self._kept: list[int] = []
        self._absent: list[int] = []
        self._allocate(flat_buffer(row * flat.size, flat.dtype, flat.device))
        self.reset()

    def seat(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Let the gradients that are sent lie in memory of the engine.

        Args:
            empty: makes a vector of so many elements; all ranks call it alike.
        """
        self.seated = True
        self._allocate(empty(self._sent.numel(), self.flat.dtype).zero_())

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def payload(self) -> torch.Tensor:
        """The gradients that are about to be sent, without flags and marks."""
        return self._rows[:, : self.flat.chunk]

    @property
    def bytes(self) -> int:
        return self._sent.numel() * self._sent.element_size()

    @property
    def wire(self) -> torch.Tensor:
        """What is summed over the ranks."""
        return torch.view_as_real(self._sent) if self.flat.dtype.is_complex else self._sent

    @property
    def result(self) -> torch.Tensor:
        """Where this rank's row of the sum goes."""
        return torch.view_as_real(self._received) if self.flat.dtype.is_complex else self._received

    @property
    def average(self) -> torch.Tensor:
        """After the cycle, this rank's chunk of the averages."""
        return self._received[: self.flat.chunk]

    @property
    def marks(self) -> torch.Tensor:
        return self._received[self.flat.chunk + len(self.parameters) :]

    def gradients(self) -> list[torch.Tensor]:
        """This rank's gradients as they are about to be sent, each as a row."""
        return [
            torch.cat([self._sent[:0], *(row for row, _, _ in self._pieces(member.start, member.stop))])
            for member in self.flat.members
        ]

    # --- a cycle --------------------------------------------------------------------------------

    def densify(self) -> None:
        """Make sparse gradients dense."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()

    def reset(self) -> None:
        """Wait for all gradients anew."""
        trainable = (index for index, parameter in enumerate(self.parameters) if parameter.requires_grad)
        self.waiting.update(trainable)
        self.work = None

    def pack(self, *, size: float, mark: int) -> None:
        """Copy the gradients into the buffer, divided by ``size``.

        Raises:
            GradientError: a gradient that is sparse or itself differentiable.
        """
        given = [parameter.grad for parameter in self.parameters]
        gradients = [self._own(index, gradient) for index, gradient in enumerate(given)]
        self._absent = [index for index, gradient in enumerate(given) if gradient is None]
        self._kept = [index for index, gradient in enumerate(given) if isinstance(gradient, GradientShare)]
        if self._kept:
            before = torch.zeros_like(self._received) if self._before is None else self._before
            self._before, self._received = self._received, before
        with torch.no_grad():
            for first, last, pieces in self._runs:
                run = zip(self.flat.members[first:last], gradients[first:last], strict=True)
                row = torch._C._nn.flatten_dense_tensors([_row(member, gradient) for member, gradient in run])
                for target, start, stop in pieces:
                    torch.div(row[start:stop], size, out=target)
            for index, pieces in self._large:
                gradient = gradients[index]
                line = None if gradient is None else self.flat.members[index].line(gradient)
                for target, start, stop in pieces:
                    if line is None:
                        target.zero_()
                    else:
                        torch.div(line[start:stop], size, out=target)
            tails = self._rows[:, self.flat.chunk :]
            tails.fill_(1)
            tails[:, len(self.parameters) + 1 - mark] = 0
            for index in self._absent:
                tails[:, index] = 0

    def pack_nothing(self, *, mark: int | None = None, joined: int | None = None) -> None:
        """Fill the buffer for a backward that has failed."""
        assert joined is None, "join() is refused"
        self._absent, self._kept = [], []
        self._sent.zero_()
        if mark is not None:
            self._rows[:, self.flat.chunk + len(self.parameters) + mark] = 1

    def clear(self) -> None:
        """Forget this rank's own gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Take the gradients away from their parameters, after they were packed."""
        for parameter in self.parameters:
            parameter.grad = None

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the averages."""
        self.average.mul_(factor)

    def unpack(self) -> bool:
        """Give the averages to the parameters; True if a gradient came in while they were on their way."""
        missing: set[int] = set()
        if self._absent:
            flags = self._received[self.flat.chunk :]
            present = (flags.real if flags.is_complex() else flags).tolist()
            missing = {index for index in self._absent if present[index] == 0}
        if self._kept:
            self._add_before()
        late = False
        for index, (parameter, share) in enumerate(zip(self.parameters, self.shares, strict=True)):
            gradient = parameter.grad
            if gradient is not None:  # this rank's own, which the next cycle averages
                share.pending = gradient
                late = True
            elif index in missing:
                continue
            parameter.grad = share
        self.changed()
        return late

    def discard(self) -> None:
        """Drop the averages."""
        self.changed()

    def _own(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What a rank adds to the sum."""
        if isinstance(gradient, GradientShare):
            if gradient.holder is not self:
                raise GradientError(
                    f"The gradient of {self.names[index]} is a share of an optimizer that is gone.",
                    fix="Call zero_grad() before the first backward pass with another optimizer.",
                )
            gradient.pending, gradient = None, gradient.pending
        if gradient is None:
            return None
        if gradient.dtype is not self.flat.dtype:
            self.flat.take_in()  # refuses a model that was converted
        name = self.names[index]
        if gradient.layout != torch.strided:
            raise GradientError(
                f"The gradient of {name} is sparse; DistributedOptimizer averages dense gradients.",
                fix="Build the module with sparse=False (torch.nn.Embedding), or pass sparse_as_dense=True.",
            )
        if gradient.requires_grad:
            raise GradientError(
                f"The gradient of {name} is itself differentiable (backward(create_graph=True)); averaging "
                "it over the ranks would cut its graph.",
                fix="Write torch.autograd.grad(loss, parameters, create_graph=True) for the inner "
                "derivative.",
            )
        return gradient

    def _add_before(self) -> None:
        """Averages of earlier backward passes of this step count too."""
        assert self._before is not None
        for index in self._kept:
            start, stop = self._place(self.flat.members[index])
            self.average[start:stop] += self._before[start:stop]

    # --- what a GradientShare asks for ----------------------------------------------------------

    def part(self, member: Member) -> torch.Tensor:
        start, stop = self._place(member)
        return self.average[start:stop]

    def bounds(self, member: Member) -> tuple[int, int]:
        start, stop = member.within(self.flat.first, self.flat.last)
        return (start - member.start, stop - member.start) if stop > start else (0, 0)

    def norm(self, member: Member, order: float) -> torch.Tensor:
        return self._across.norm(self, member, order)

    def changed(self) -> None:
        self._across.changed()

    def largest(self, value: torch.Tensor) -> None:
        self._across.largest(value)

    def gather(self, member: Member) -> torch.Tensor:
        return self._across.gather(self, member)

    # --- places ---------------------------------------------------------------------------------

    def _allocate(self, sent: torch.Tensor) -> None:
        flat = self.flat
        self._sent, self._rows = sent, sent.view(flat.size, -1)
        self._runs = [
            (first, last, self._pieces(flat.members[first].start, flat.members[last - 1].stop))
            for first, last in _small_runs(flat)
        ]
        self._large = [
            (index, self._pieces(member.start, member.stop))
            for index, member in enumerate(flat.members)
            if not _is_small(member)
        ]

    def _place(self, member: Member) -> tuple[int, int]:
        """Of a parameter in this rank's chunk."""
        start, stop = member.within(self.flat.first, self.flat.last)
        return start - self.flat.first, stop - self.flat.first

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        """Where elements of the flat buffer are in the rows that are sent."""
        pieces: list[Piece] = []
        at = start
        while at < stop:
            row, offset = divmod(at, self.flat.chunk)
            end = min(stop, (row + 1) * self.flat.chunk)
            pieces.append((self._rows[row, offset : offset + end - at], at - start, end - start))
            at = end
        return pieces


def _is_small(member: Member) -> bool:
    return member.parameter.numel() < _buckets.SMALL


def _small_runs(flat: Flat) -> Iterator[tuple[int, int]]:
    """Neighbours whose gradients are copied together: one call for many beats many calls."""
    first: int | None = None
    for index, member in enumerate(flat.members):
        if _is_small(member):
            first = index if first is None else first
        elif first is not None:
            yield first, index
            first = None
    if first is not None:
        yield first, len(flat.members)


def _row(member: Member, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return member.parameter.new_zeros(member.stop - member.start)
    if gradient.is_contiguous() and member.parameter.is_contiguous():
        return gradient
    return member.line(gradient)

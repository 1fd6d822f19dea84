"""Flat buffers in which gradients travel, many parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hora.core.errors import GradientError

__all__ = ["Bucket", "assign"]

FIRST_BUCKET_MB = 1.0
"""The first bucket is small, so that averaging starts early in backward (PyTorch DDP does the same)."""

Named = tuple[str, torch.Tensor]


class Bucket:
    """Parameters of one dtype and device, and the flat buffer of their gradients.

    The buffer holds the gradients, then one presence flag per parameter (1 where this rank has a
    gradient), then two marks that tell an even step from an odd one. All of it is summed over the ranks
    in one message: a flag that stays 0 means that no rank has that gradient, and two marks above 0 mean
    that the ranks are not at the same step.

    While a message is on its way the parameters' ``grad`` is None, so that nobody reads or changes the
    buffer; afterwards it is a view of the buffer.
    """

    def __init__(self, named: Sequence[Named]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        self._dtype, self._device = first.dtype, first.device
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._elements = sum(self._sizes)
        # Of a tensor with gaps or overlaps, empty_like has the plain strides.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self._contiguous = all(parameter.is_contiguous() for parameter in self.parameters)
        self._views: Sequence[torch.Tensor] = ()
        self._absent: list[int] = []
        self.work: Any = None
        self.started = 0.0
        self._allocate()
        self.reset()

    @property
    def bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    @property
    def wire(self) -> torch.Tensor:
        """What is summed over the ranks."""
        return torch.view_as_real(self._flat) if self._dtype.is_complex else self._flat

    @property
    def marks(self) -> torch.Tensor:
        """The sums of the two marks, after the message has come back."""
        return self._marks

    def reset(self) -> None:
        """Forget which gradients are ready."""
        self._seen = [False] * len(self.parameters)
        self._waiting = len(self.parameters)
        self.work = None

    def ready(self, index: int) -> bool:
        """Note that a gradient is ready; True when it was the last one missing."""
        if self._seen[index]:
            return False
        self._seen[index] = True
        self._waiting -= 1
        return self._waiting == 0

    @property
    def complete(self) -> bool:
        return self._waiting == 0

    def pack(self, *, size: int, mark: int) -> None:
        """Move the gradients into the buffer, divided by ``size``.

        Raises:
            GradientError: a gradient that is sparse or itself differentiable.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        with torch.no_grad():
            inside = []
            for index, (gradient, address) in enumerate(zip(gradients, self._addresses, strict=True)):
                if gradient is not None and (gradient.layout != torch.strided or gradient.requires_grad):
                    self._refuse(index, gradient)
                inside.append(gradient is not None and gradient.data_ptr() == address)
            if self._users() > self._own_users + sum(inside):
                # Somebody keeps a gradient of an earlier step; plain torch would not change it either.
                self._allocate()
                inside = [False] * len(gradients)
            views = self._make_views()
            sources, targets, absent = [], [], []
            for index, gradient in enumerate(gradients):
                if gradient is None:
                    absent.append(index)
                    continue
                if not inside[index]:
                    sources.append(gradient)
                    targets.append(views[index])
            if sources:
                torch._foreach_copy_(targets, sources)
            self._tail.copy_(self._full_tail[mark])
            for index in absent:
                views[index].zero_()
                self._tail[index] = 0
            self._payload.div_(size)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = None
        self._views, self._absent = views, absent

    def pack_nothing(self, *, mark: int) -> None:
        """Fill the buffer for a rank that contributes no gradient, whatever its parameters hold."""
        with torch.no_grad():
            if self._users() > self._own_users:
                self._allocate()
            self._flat.zero_()
            self._tail[len(self.parameters) + mark] = 1

    def unpack(self) -> bool:
        """Give the averages to the parameters; True if a gradient came in while they were on their way."""
        present: list[float] = []
        if self._absent:
            tail = self._tail.real if self._dtype.is_complex else self._tail
            present = tail.tolist()
        absent = {index for index in self._absent if present[index] == 0}
        late = False
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is None:
                if index not in absent:
                    parameter.grad = view
            else:
                late = True
                if index not in absent:
                    parameter.grad.add_(view)
        self._views = ()
        return late

    def discard(self) -> None:
        """Drop the averages."""
        self._views = ()

    def _allocate(self) -> None:
        count = len(self.parameters)
        self._flat = torch.zeros(self._elements + count + 2, dtype=self._dtype, device=self._device)
        self._payload = self._flat[: self._elements]
        self._tail = self._flat[self._elements :]
        self._marks = self._flat[self._elements + count :]
        self._full_tail = torch.ones(2, count + 2, dtype=self._dtype, device=self._device)
        self._full_tail[0, count + 1] = 0
        self._full_tail[1, count] = 0
        start, width = self._flat.data_ptr(), self._flat.element_size()
        self._addresses = []
        for size in self._sizes:
            self._addresses.append(start if size else -1)
            start += size * width
        self._own_users = self._users()

    def _users(self) -> int:
        """How many tensors share the buffer's memory, the bucket's own ones included."""
        count: int = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)
        return count

    def _make_views(self) -> Sequence[torch.Tensor]:
        if self._contiguous:
            views: Sequence[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(
                self._payload, self.parameters
            )
            return views
        views, offset = [], 0
        for parameter, size, stride in zip(self.parameters, self._sizes, self._strides, strict=True):
            # In the parameter's own memory order (channels last, say), as optimizers work on both.
            views.append(self._payload.as_strided(parameter.shape, stride, offset))
            offset += size
        return views

    def _refuse(self, index: int, gradient: torch.Tensor) -> None:
        name = self.names[index]
        if gradient.layout != torch.strided:
            raise GradientError(
                f"The gradient of {name} is sparse; DistributedOptimizer averages dense gradients.",
                fix="Build the module with sparse=False (torch.nn.Embedding).",
            )
        raise GradientError(
            f"The gradient of {name} is itself differentiable (backward(create_graph=True)); averaging it "
            "over the ranks would cut its graph.",
            fix="Write torch.autograd.grad(loss, parameters, create_graph=True) for the inner derivative.",
        )


def assign(named: Sequence[Named], *, bucket_mb: float) -> list[Bucket]:
    """Spread parameters over buckets, in the order in which backward makes their gradients.

    That is the reverse of the order of registration. Buckets are sorted by when they are complete.
    """
    return [Bucket(members) for members in _split(named, bucket_mb=bucket_mb)]


def _split(named: Sequence[Named], *, bucket_mb: float) -> Iterator[list[Named]]:
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Named], int]] = {}
    closed: list[tuple[int, list[Named]]] = []
    for position, (name, parameter) in enumerate(reversed(named)):
        key = (parameter.dtype, parameter.device)
        members, used = filling.get(key, ([], 0))
        members.append((name, parameter))
        used += parameter.numel() * parameter.element_size()
        limit = FIRST_BUCKET_MB if not closed else bucket_mb
        if used >= limit * 2**20:
            closed.append((position, members))
            members, used = [], 0
        filling[key] = (members, used)
    positions = {id(parameter): position for position, (_, parameter) in enumerate(reversed(named))}
    closed += [(positions[id(members[-1][1])], members) for members, _ in filling.values() if members]
    for _, members in sorted(closed, key=lambda entry: entry[0]):
        yield members

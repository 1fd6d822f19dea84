"""Flat buffers in which gradients travel, many parameters at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hora.core.errors import GradientError

__all__ = ["Bucket", "assign", "layout_of", "spread"]

FIRST_BUCKET_MB = 1.0
"""The first bucket is small, so that averaging starts early in backward (PyTorch DDP does the same)."""

SMALL = 16384
"""Elements below which a gradient is copied, all of a bucket in one call. Making a view and assigning it
costs more than copying that much; measured with the benchmark ``train_vs_peers.py``."""

COUNTED = 128
"""Ranks whose ``join()`` is counted in one element: bfloat16 adds up to 256 ones exactly."""

ALIGNMENT = 64
"""Bytes at whose multiples large gradients start: a cache line, as torch's own tensors do."""

Named = tuple[str, torch.Tensor]


class Bucket:
    """Parameters of one dtype and device, and the flat buffer of their gradients.

    The buffer holds the gradients, then one presence flag per parameter (1 where this rank has a
    gradient), then two marks that tell an even step from an odd one, then the count of the ranks that have
    joined (one element for each 128 ranks). All of it is summed over the ranks in one message: a flag that
    stays 0 means that no rank has that gradient, and two marks above 0 mean that the ranks are not at the
    same step.

    Args:
        named: names and parameters.
        size: number of ranks that sum.

    Small gradients are copied in and out. The ``grad`` of a large parameter is None while the message is on
    its way, so that nobody changes the buffer, and a view of the buffer afterwards.

    Attributes:
        waiting: parameters, by their number, whose gradient is not ready yet.
        label: what the bucket is called among the operations of all ranks.
        payload: the gradients in the buffer, without flags and marks.
        tail: the flags, the marks and the count.
        marks: after the message has come back, the sums of the two marks, and how many ranks have joined.
        work: the message on its way.
        started: when it left (``time.time()``).
        place: its place among the collectives, for the guard.
        seated: whether :meth:`seat` was called.
        entered: for the guard: where the script called the backward pass that it went with, and which call
            it was.
    """

    def __init__(self, named: Sequence[Named], *, size: int = 1) -> None:
        self.label = ""
        self._counters = -(-size // COUNTED)
        first = named[0][1]
        self._dtype, self._device = first.dtype, first.device
        # Those that are copied together come first.
        named = sorted(named, key=lambda entry: not self._is_joined(entry[1]))
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._joined = sum(map(self._is_joined, self.parameters))
        self._sizes = [parameter.numel() for parameter in self.parameters]
        # Of a tensor with gaps or overlaps, empty_like has the plain strides.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self._absent: list[int] = []
        self.waiting: set[int] = set()
        self._large: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.work: Any = None
        self.started = 0.0
        self.place: tuple[int, int] | None = None
        self.seated = False
        self.entered: tuple[Any, tuple[int, int]] | None = None
        self._allocate()
        self.reset()

    def _is_joined(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() < SMALL and parameter.is_contiguous()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    @property
    def wire(self) -> torch.Tensor:
        """What is summed over the ranks."""
        return torch.view_as_real(self._flat) if self._dtype.is_complex else self._flat

    def gradients(self) -> list[torch.Tensor]:
        """Views of the gradients in the buffer."""
        return [self._view(index) for index in range(len(self.parameters))]

    def densify(self) -> None:
        """Make sparse gradients dense."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()

    def reset(self) -> None:
        """Wait for all gradients anew."""
        self.waiting.update(range(len(self.parameters)))
        self.work = None

    def pack(self, *, size: float, mark: int) -> None:
        """Copy the gradients into the buffer, divided by ``size``.

        Raises:
            GradientError: a gradient that is sparse or itself differentiable.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for index, gradient in enumerate(gradients):
            if gradient is not None and (gradient.layout != torch.strided or gradient.requires_grad):
                self._refuse(index, gradient)
        with torch.no_grad():
            self._vacate(gradients[self._joined :])
            self._absent = [index for index, gradient in enumerate(gradients) if gradient is None]
            if self._joined:
                small = [
                    view.zero_() if gradient is None else gradient
                    for view, gradient in zip(self._small, gradients, strict=False)
                ]
                torch.div(torch._C._nn.flatten_dense_tensors(small), size, out=self._small_payload)
                self._versions = [gradient._version for gradient in small]
            self._pack_large(gradients[self._joined :], size=size)
            self.tail.copy_(self._full_tail[mark])
            for index in self._absent:
                self.tail[index] = 0

    def clear(self) -> None:
        """Forget this rank's own gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Take the large gradients away from their parameters, after they were packed."""
        for parameter in self.parameters[self._joined :]:
            parameter.grad = None

    def pack_nothing(self, *, mark: int | None = None, joined: int | None = None) -> None:
        """Fill the buffer for a rank that contributes no gradient, whatever its parameters hold.

        Args:
            mark: parity of the step, of a rank that makes one.
            joined: the rank's place among those that sum, if it has joined.
        """
        with torch.no_grad():
            self._vacate([])
            self._absent = []
            self._flat.zero_()
            if mark is not None:
                self.tail[len(self.parameters) + mark] = 1
            if joined is not None:
                self.marks[2 + joined // COUNTED] = 1

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients in the buffer."""
        with torch.no_grad():
            self._flat[: self._elements].mul_(factor)

    def unpack(self) -> bool:
        """Give the averages to the parameters; True if a gradient came in while they were on their way."""
        absent: set[int] = set()
        if self._absent:
            flags = (self.tail.real if self._dtype.is_complex else self.tail).tolist()
            absent = {index for index in self._absent if flags[index] == 0}
        late = False
        sources, targets = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self._small, strict=False)):
            gradient = parameter.grad
            if gradient is None:
                if index not in absent:
                    parameter.grad = view.clone()
            elif gradient._version != self._versions[index]:
                late = True  # it holds the sum of this rank's two, which the next cycle averages
            else:
                sources.append(view)
                targets.append(gradient)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        for index, view in enumerate(self._large, self._joined):
            parameter = self.parameters[index]
            if index in absent:
                continue
            if parameter.grad is None:
                parameter.grad = view
            else:
                parameter.grad.add_(view)
                late = True
        self._large = []
        return late

    def discard(self) -> None:
        """Drop the averages."""
        self._large = []

    def seat(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Move into memory that ``empty`` makes: the engine's own, which it need not copy from and to.

        All ranks call it at the same place of their sequence of collectives. A buffer that replaces this
        one (see :meth:`pack`) is a rank's own.
        """
        self.seated = True
        self._allocate(empty)

    def _allocate(self, empty: Callable[[int, torch.dtype], torch.Tensor] | None = None) -> None:
        count, first = len(self.parameters), self.parameters[0]
        border = sum(self._sizes[: self._joined])
        aligned = ALIGNMENT // first.element_size()
        self._offsets = [0, *itertools.accumulate(self._sizes[: self._joined])][: self._joined]
        end = border
        for size in self._sizes[self._joined :]:
            start = -(-end // aligned) * aligned
            self._offsets.append(start)
            end = start + size
        self._elements = end
        tail = count + 2 + self._counters
        if empty is None:
            self._flat = torch.zeros(self._elements + tail, dtype=self._dtype, device=self._device)
        else:
            self._flat = empty(self._elements + tail, self._dtype)
        self._small_payload = self._flat[:border]
        self._small = [self._view(index) for index in range(self._joined)]
        self._large_payload = self._flat[border : self._elements]
        self.payload = self._flat[: self._elements]
        self.tail = self._flat[self._elements :]
        self.marks = self._flat[self._elements + count :]
        self._full_tail = torch.zeros(2, tail, dtype=self._dtype, device=self._device)
        self._full_tail[:, :count] = 1
        self._full_tail[0, count] = 1
        self._full_tail[1, count + 1] = 1
        start, width = self._flat.data_ptr(), self._flat.element_size()
        self._addresses = {start + offset * width for offset in self._offsets[self._joined :]}
        self._large = []
        self._own_users = self._users()

    def _pack_large(self, gradients: Sequence[torch.Tensor | None], *, size: float) -> None:
        self._large = [self._view(index) for index in range(self._joined, len(self.parameters))]
        if self._device.type == "cpu":
            for gradient, view in zip(gradients, self._large, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    torch.div(gradient, size, out=view)
            return
        pairs = list(zip(gradients, self._large, strict=True))
        for view in [view for gradient, view in pairs if gradient is None]:
            view.zero_()
        present = [(gradient, view) for gradient, view in pairs if gradient is not None]
        if present:  # one kernel for many, where starting a kernel is what costs
            torch._foreach_copy_([view for _, view in present], [gradient for gradient, _ in present])
            self._large_payload.div_(size)

    def _vacate(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make the buffer free to be overwritten.

        Somebody may keep a gradient of an earlier step. Plain torch would not change it any more, so it
        keeps the buffer, and there is a new one. ``gradients`` that lie in the buffer are not of that kind.
        """
        users = self._users()
        if users == self._own_users:
            return
        inside = sum(
            gradient is not None and gradient.data_ptr() in self._addresses for gradient in gradients
        )
        if users > self._own_users + inside:
            self._allocate()

    def _users(self) -> int:
        """How many tensors share the buffer's memory, the bucket's own ones included."""
        count: int = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)
        return count

    def _view(self, index: int) -> torch.Tensor:
        # In the parameter's own memory order (channels last, say), as optimizers work on both.
        parameter = self.parameters[index]
        return self._flat.as_strided(parameter.shape, self._strides[index], self._offsets[index])

    def _refuse(self, index: int, gradient: torch.Tensor) -> None:
        name = self.names[index]
        if gradient.layout != torch.strided:
            raise GradientError(
                f"The gradient of {name} is sparse; DistributedOptimizer averages dense gradients.",
                fix="Build the module with sparse=False (torch.nn.Embedding), or pass sparse_as_dense=True.",
            )
        raise GradientError(
            f"The gradient of {name} is itself differentiable (backward(create_graph=True)); averaging it "
            "over the ranks would cut its graph.",
            fix="Write torch.autograd.grad(loss, parameters, create_graph=True) for the inner derivative.",
        )


def assign(
    named: Sequence[Named], *, bucket_mb: float, groups: Mapping[int, int] | None = None, size: int = 1
) -> list[Bucket]:
    """Spread parameters over buckets, from the last to the first, as backward makes their gradients.

    Buckets are sorted by when they are complete.

    Args:
        named: names and parameters, in the order in which forward uses them: that of registration, or as
            ``Readiness`` has found.
        bucket_mb: size of a bucket, if it is not a group.
        groups: ``id`` of a parameter -> number of its group; a group is one bucket, whatever its size (one
            for each dtype and device).
        size: number of ranks.
    """
    return [Bucket(members, size=size) for members in spread(named, bucket_mb=bucket_mb, groups=groups or {})]


def layout_of(named: Sequence[Named], bucket_mb: float) -> tuple[int, ...]:
    """How many parameters each bucket would have: two sizes with equal layouts make the same buckets."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    return tuple(len(members) for members in spread(trainable, bucket_mb=bucket_mb, groups={}))


def spread(named: Sequence[Named], *, bucket_mb: float, groups: Mapping[int, int]) -> Iterator[list[Named]]:
    """Which parameters share a bucket (see :func:`assign`)."""
    filling: dict[tuple[torch.dtype, torch.device, int | None], tuple[list[Named], int]] = {}
    closed: list[tuple[int, list[Named]]] = []
    for position, (name, parameter) in enumerate(reversed(named)):
        group = groups.get(id(parameter))
        key = (parameter.dtype, parameter.device, group)
        members, used = filling.get(key, ([], 0))
        members.append((name, parameter))
        used += parameter.numel() * parameter.element_size()
        limit = bucket_mb if closed else min(FIRST_BUCKET_MB, bucket_mb)
        if group is None and used >= limit * 2**20:
            closed.append((position, members))
            members, used = [], 0
        filling[key] = (members, used)
    positions = {id(parameter): position for position, (_, parameter) in enumerate(reversed(named))}
    closed += [(positions[id(members[-1][1])], members) for members, _ in filling.values() if members]
    for _, members in sorted(closed, key=lambda entry: entry[0]):
        yield members

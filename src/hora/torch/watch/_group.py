"""What the guard keeps of one optimizer: its tensors, their names, and what happened to them lately."""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hora.adapter.prints import MOST, combined, is_due
from hora.torch.watch._digest import digests

if TYPE_CHECKING:
    from hora.torch.watch._gradients import Pass

__all__ = ["Group", "is_plain"]

FEW = 8
"""Changes of the learning rate that are kept until the next report."""

HYPER = (int, float, bool, str)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_version = operator.attrgetter("_version")


class Group:
    """One optimizer.

    Args:
        optimizer: it; held weakly.
        distributed: whether its gradients are averaged by Hora.
        members: the ranks that should have the same.
        where: the user's line that made it, or stepped first.

    Attributes:
        reference: to the optimizer.
        key: the same for the same optimizer on all ranks.
        steps: steps that it has made.
        averaged: whether the form for Horovod scripts averages its gradients.
        changes: whether each rank steps by its own gradients, with a state of its own, and the changes are
            combined afterwards: Adasum.
        apart: whether each rank steps by its own gradients for now, and has parameters of its own.
        frame: of the outermost ``step()`` under way; a class may call the step of its base.
        closure: whether that has a closure, which computes the gradients.
        local: sums (on a GPU: maxima) of this rank's own gradients since the last step.
        bad: the first gradients that were not finite since the last step, by bucket.
        pending: maxima on a GPU, not looked at yet, by bucket.
        away: maxima on their way from the GPU.
        written: what wrote parameters between steps since the last report.
        restored: loaded states since the last report.
        steered: the first steps since the last report that used other learning rates than the one before.
        versions: how often each parameter had been written to when that was counted last.
        own_writes: how often the optimizer writes to each in a step.
        regular: whether that is the same in each step, as far as it was seen.
        counted: the step after which it was counted last.
        start: fingerprints of the parameters before the first step.
        after: those after the last step, if they were taken there.
        closely: steps before which fingerprints are still taken.
        silent: parameters that have got no gradient yet.
        stuck: parameters that should have changed and have not yet.
        quiet: parameters without a gradient in the last step.
        branches: whether these have been others in other steps: the model uses its parts by turns.
        planned: whether it has been considered for the plan.
        fed: steps of which it was reported what they were fed.
        looked: whether the parameters that do not move have been reported.
        done: not watched: its parameters are spread over the ranks.
        modules: which the parameters belong to.
    """

    def __init__(
        self, optimizer: Optimizer, *, distributed: bool, members: Sequence[int], where: str | None
    ) -> None:
        self.reference = weakref.ref(optimizer)
        self.distributed = distributed
        self.members = list(members)
        self.where = where
        self.key = ""
        self.steps = 0
        self.frame: FrameType | None = None
        self.closure = False
        self.averaged = False
        self.changes = False
        self.apart = False
        self.local: list[Any] = []
        self.bad: dict[int, dict[str, Any]] = {}
        self.pending: dict[int, tuple[list[str], torch.Tensor, Pass]] = {}
        self.away: collections.deque[tuple[Any, torch.Tensor, list[str], int, Pass]] = collections.deque()
        self.written: list[dict[str, Any]] = []
        self.restored: list[dict[str, Any]] = []
        self.steered: list[tuple[int, list[float]]] = []
        self._rates: list[float] = []
        self.versions: list[int] = []
        self.own_writes: list[int] = []
        self.regular = distributed
        self.counted = 0
        self.start: list[int] = []
        self.after: list[int] = []
        self.closely = 0
        self.silent: set[int] = set()
        self.stuck: set[int] = set()
        self.quiet: set[int] = set()
        self.branches = False
        self.planned = False
        self.fed = 0
        self.looked = False
        self.done = False
        self.modules: list[weakref.ref[torch.nn.Module]] = []
        self._names: dict[int, str] = {}
        self._shape: list[int] = []
        self._parameters: list[torch.Tensor] = []
        self._buffers: dict[str, torch.Tensor] = {}

    def anew(self) -> Group:
        """The same optimizer, watched as if from its first step."""
        optimizer = self.reference()
        assert optimizer is not None, "who asks has it"
        group = Group(optimizer, distributed=self.distributed, members=self.members, where=self.where)
        group.averaged, group.changes, group.modules = self.averaged, self.changes, self.modules
        group.name(self._names)
        return group

    @property
    def optimizer(self) -> Optimizer | None:
        return self.reference()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters, kept here too: the last report comes when the optimizer may be gone."""
        optimizer = self.reference()
        if optimizer is not None:
            shape = [len(group["params"]) for group in optimizer.param_groups]
            if shape != self._shape:
                self._shape = shape
                self._parameters = [
                    parameter for group in optimizer.param_groups for parameter in group["params"]
                ]
        return self._parameters

    def count_writes(self) -> list[int]:
        """How often each parameter has been written to."""
        return list(map(_version, self.parameters))

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [self._names.get(id(p), f"parameter {i}") for i, p in enumerate(self.parameters)]

    @property
    def signature(self) -> str:
        """Equal for optimizers over parameters of the same number, dtypes and shapes."""
        said = [f"{parameter.dtype}{tuple(parameter.shape)}" for parameter in self.parameters]
        return blake2b(",".join(said).encode(), digest_size=6).hexdigest()

    def name(self, names: Mapping[int, str]) -> None:
        """Learn names, by the ``id`` of parameters; the first one counts."""
        self._names = dict(names) | self._names

    def adopt(self, modules: Iterable[torch.nn.Module]) -> None:
        """Learn which modules the parameters belong to."""
        own = {id(parameter) for parameter in self.parameters}
        for module in modules:
            found = {id(parameter): name for name, parameter in module.named_parameters()}
            if own & found.keys():
                self.name({key: name for key, name in found.items() if key in own})
                if all(known() is not module for known in self.modules):
                    self.modules.append(weakref.ref(module))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The modules' buffers that a ``state_dict`` would hold, and that no wrapper keeps equal."""
        found: dict[str, torch.Tensor] = {}
        kept: set[int] = set()
        for reference in self.modules:
            module = reference()
            if module is None:
                return self._buffers  # as they were last: a module's end is one of the times of a report
            if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
                kept |= {id(buffer) for buffer in module.buffers()}  # rank 0's, before each forward pass
            for prefix, inner in module.named_modules():
                for name, buffer in inner._buffers.items():
                    if buffer is not None and name not in inner._non_persistent_buffers_set:
                        found.setdefault(f"{prefix}.{name}" if prefix else name, buffer)
        self._buffers = {
            name: buffer for name, buffer in found.items() if is_plain(buffer) and id(buffer) not in kept
        }
        return self._buffers

    def is_due(self) -> bool:
        """Whether the step just made is one of those with a fingerprint."""
        return is_due(self.steps)

    def states(self) -> list[int]:
        """A number per parameter for the optimizer's tensors about it."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        flat: list[torch.Tensor] = []
        counts: list[int] = []
        for number, parameter in enumerate(self.parameters):
            state = optimizer.state.get(parameter, {})
            tensors = [
                value
                for key, value in sorted(state.items(), key=lambda item: str(item[0]))
                # A count of steps is one number, the same for all parameters.
                if isinstance(value, torch.Tensor)
                and (value.numel() > 1 or parameter.numel() == 1 or not number)
                and is_plain(value)
            ]
            flat += tensors
            counts.append(len(tensors))
        numbers = iter(digests(flat))
        return [
            functools.reduce(lambda sum_, number: (sum_ * 31 + number) & 0xFFFFFFFF, found, 0)
            for found in ([next(numbers) for _ in range(count)] for count in counts)
        ]

    def gradients(self) -> list[int]:
        """A number per parameter for its gradient; 0: none."""
        present = [
            (index, parameter.grad)
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None and is_plain(parameter.grad)
        ]
        numbers = [0] * len(self.parameters)
        for (index, _), number in zip(present, digests([gradient for _, gradient in present]), strict=True):
            numbers[index] = number
        return numbers

    def note_rates(self) -> None:
        """After a step: were its learning rates those of the step before?"""
        optimizer = self.reference()
        groups = optimizer.param_groups[:20] if optimizer is not None else []
        # Those in a tensor may be on a GPU, which would be waited for.
        rates = [rate for group in groups if isinstance(rate := group.get("lr"), float)]
        if rates != self._rates:
            if self._rates and len(self.steered) < FEW:
                self.steered.append((self.steps, rates))
            self._rates = rates

    @property
    def is_learning(self) -> bool:
        """Whether a learning rate is above 0."""
        optimizer = self.optimizer
        return optimizer is not None and any(float(group.get("lr", 1.0)) for group in optimizer.param_groups)

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter; 0.0 where there is none."""
        optimizer = self.optimizer
        if optimizer is None:
            return [0.0] * len(self.parameters)
        return [float(group.get("lr", 0.0)) for group in optimizer.param_groups for _ in group["params"]]

    def rates(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each parameter group that are numbers or words."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        return [
            {
                str(key): _plain(value)
                for key, value in group.items()
                if key not in ("params", "initial_lr") and _plain(value) is not None
            }
            for group in optimizer.param_groups[:20]
        ]


def is_plain(tensor: object) -> bool:
    """Whether it is an ordinary tensor with data, rather than a part of one that is spread over ranks."""
    return (
        type(tensor) in _PLAIN
        and isinstance(tensor, torch.Tensor)
        and not tensor.is_meta
        and not tensor.is_quantized
        and tensor.layout == torch.strided
    )


def shortened(numbers: Sequence[int]) -> list[int]:
    """The list as it is reported: with at most ``MOST`` numbers, those of the others folded into one."""
    if len(numbers) <= MOST:
        return list(numbers)
    return [*numbers[: MOST - 1], int(combined(numbers[MOST - 1 :]), 16)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, HYPER) else None

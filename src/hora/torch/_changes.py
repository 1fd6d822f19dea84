"""Steps that the ranks take by themselves, and then combine: Adasum of the changes of parameters.

Each rank steps with its own gradients. The change of each parameter is combined over the ranks by Adasum,
and the new value is the old one plus the combined change. (Maleki et al., "Scaling Distributed Training
with Adaptive Summation", arXiv:2006.02924; Horovod's ``DistributedOptimizer`` has the same form.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hora.adapter.guard import collective
from hora.adapter.ops import ReduceOp
from hora.torch._adasum import adasum
from hora.torch._context import Context
from hora.torch._dtypes import reduced_in
from hora.torch._rules import GradientCompression, Rule

__all__ = ["Changes", "LocalSteps"]

Combine = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes this rank's changes and returns those of all ranks together."""


class Changes:
    """What a step changes; made before the step.

    Args:
        parameters: those that the step may change.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._starts = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def combine(self, combine: Combine) -> None:
        """After the step: let the parameters be where they were before, plus the combined changes."""
        with torch.no_grad():
            own = [parameter - start for parameter, start in self._starts]
            for (parameter, start), change in zip(self._starts, combine(own), strict=True):
                parameter.copy_(start + change)


class LocalSteps:
    """The steps of one optimizer on one rank, for the native interface.

    Args:
        context: of the job.
        rule: among whom, and how changes travel.
        number: of the optimizer, among those that work over all ranks.
    """

    def __init__(self, context: Context, rule: Rule, *, number: int | None) -> None:
        self._context = context
        self._rule = rule
        self._label = f"changes {number}"
        self._set_id = rule.process_set.process_set_id or 0
        self._changes: Changes | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        self._changes = Changes(_parameters(optimizer))

    def after_step(self) -> None:
        changes, self._changes = self._changes, None
        assert changes is not None, "before_step() came first"
        self._context.presence.enter(self._label, self._set_id)
        changes.combine(self._combine)

    def answer(self, optimizer: Optimizer) -> None:
        """Take part in a step of the others. Zeros count for nothing in Adasum."""
        self._combine([torch.zeros_like(parameter) for parameter in _parameters(optimizer)])

    def _combine(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        with collective(self._context, "combine changes", own, process_set=self._rule.process_set):
            return self._combined(own)

    def _combined(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        group = self._rule.process_set.group
        token = torch.zeros(1, dtype=torch.int32, device=self._context.control)
        # The swaps of Adasum cannot be watched; once this is through, everybody is there.
        self._context.presence.wait(
            dist.all_reduce(token, group=group, async_op=True),
            token.device,
            process_set=self._rule.process_set,
            what="step() of a DistributedOptimizer of some ranks",
            answered=self._set_id == 0,
        )
        compression = self._rule.compression
        assert not isinstance(compression, GradientCompression), "Rule.check() refuses it"
        packed = [compression.compress(change) for change in own]
        wires = [
            wire.to(
                reduced_in(wire.dtype, ReduceOp.Adasum) if wire.dtype is change.dtype else wire.dtype,
                memory_format=torch.contiguous_format,
            ).contiguous()
            for change, (wire, _) in zip(own, packed, strict=True)
        ]
        kinds = {(wire.dtype, wire.device): None for wire in wires}  # in an order that all ranks have
        for kind in kinds:
            places = [place for place, wire in enumerate(wires) if (wire.dtype, wire.device) == kind]
            for place, result in zip(places, adasum([wires[place] for place in places], group), strict=True):
                wires[place] = result
        return [
            compression.decompress(wire, context).to(change.dtype)
            for wire, change, (_, context) in zip(wires, own, packed, strict=True)
        ]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

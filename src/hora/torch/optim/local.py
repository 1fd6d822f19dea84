"""Post-local SGD: workers that step by themselves, and average their models now and then."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hora.adapter.ops import ReduceOp
from hora.core.errors import UsageError
from hora.torch._collectives import grouped_allreduce

__all__ = ["PostLocalSGD"]


class PostLocalSGD:
    """Lets a distributed optimizer average parameters each few steps, instead of gradients in each.

    T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, arXiv:1808.07217 (local SGD in the place of large batches),
    section 3. With N workers, of which worker n has parameters w_n and gradients g_n::

        w   <- step(w, mean of all g_n)        step t < start: as ever
        w_n <- step(w_n, g_n)                  t >= start
        w_n <- mean of all w_m                 after it, when t + 1 - start is a multiple of period

    A step is that of the optimizer, whatever it is; its state is each worker's own in the second phase, as in
    the paper. There, local steps begin at the first decay of the learning rate, with a period of 16.

    Local steps are steps on smaller batches, which is what they are for: N workers do not train as one there,
    and ``hora verify`` says so. Workers have the same parameters after an averaging step only: evaluate and
    save there, or call :meth:`average` before.

    Args:
        optimizer: what ``DistributedOptimizer`` returned, with ``op=Average`` and without ``shard``.
        start: steps before the local ones; 0: none.
        period: local steps from one averaging to the next.
        state: average the optimizer's floating-point state too (H. Yu et al., arXiv:1905.03817), so that a
            checkpoint after an averaging step is complete.

    Attributes:
        steps: taken so far.

    Raises:
        UsageError: an optimizer of another kind, or a number out of its range.
    """

    def __init__(self, optimizer: Optimizer, *, start: int, period: int, state: bool = False) -> None:
        for name, value, least in (("start", start, 0), ("period", period, 1)):
            if not isinstance(value, int) or value < least:
                raise UsageError(
                    f"PostLocalSGD takes a whole number of steps as {name}, at least {least}, not {value!r}.",
                    fix=f"Write for example {name}={16 if least else 1000}.",
                )
        attachment = getattr(optimizer, "_hora", None)
        if attachment is None or not hasattr(attachment, "step_apart"):
            raise UsageError(
                f"PostLocalSGD takes a distributed optimizer, not a plain {type(optimizer).__name__}.",
                fix="Write PostLocalSGD(hora.DistributedOptimizer(optimizer, model), ...).",
            )
        if attachment.spread or attachment.rule.op is not ReduceOp.Average:
            why = "shard=, where no rank has all" if attachment.spread else f"op={attachment.rule.op.name}"
            raise UsageError(
                f"PostLocalSGD does not go with {why}: ranks step alone, and on averaged gradients first.",
                fix="Leave out shard and op of DistributedOptimizer.",
            )
        self.start, self.period, self.steps = start, period, 0
        self._state = state
        self._optimizer = weakref.ref(optimizer)
        self._attachment = attachment
        reference = weakref.ref(self)
        vars(optimizer)["_hora_local"] = self  # lives as long as the optimizer
        optimizer.register_step_post_hook(lambda *_: _after_step(reference))
        self._part()

    @property
    def apart(self) -> bool:
        """Whether the workers step by themselves by now."""
        return bool(self._attachment.rule.apart)

    @torch.no_grad()
    def average(self) -> None:
        """Let all workers have the mean of their parameters. Every rank of the optimizer calls it."""
        optimizer, rule = self._optimizer(), self._attachment.rule
        if optimizer is None or rule.members == 1 or not self.apart:
            return
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._state:
            tensors += [
                value
                for parameter in list(tensors)
                for key, value in sorted(optimizer.state.get(parameter, {}).items())
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
            ]
        means = grouped_allreduce(tensors, name="post-local SGD", process_set=rule.process_set)
        torch._foreach_copy_(tensors, means)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            UsageError: one of before the local steps, when they have begun.
        """
        if self.apart and state["steps"] < self.start:
            raise UsageError(
                f"The workers step by themselves since step {self.start}; this is a state of step "
                f"{state['steps']}, before that.",
                fix="Load it into a new optimizer and a new PostLocalSGD.",
            )
        self.steps = state["steps"]
        self._part()

    def _part(self) -> None:
        if self.steps >= self.start:
            self._attachment.step_apart()


def _after_step(reference: weakref.ref[PostLocalSGD]) -> None:
    local = reference()
    assert local is not None, "the optimizer owns it"
    local.steps += 1
    if local.apart and (local.steps - local.start) % local.period == 0:
        local.average()
    local._part()

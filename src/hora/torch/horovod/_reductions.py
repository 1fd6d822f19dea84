"""The reductions of one optimizer's gradients: which are under way, and what is left to start."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hora.adapter.ops import ReduceOp
from hora.torch._handles import Handle
from hora.torch._process_sets import ProcessSet
from hora.torch.horovod._arguments import named, split_groups
from hora.torch.horovod._operations import (
    allreduce,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from hora.torch.horovod._session import session

__all__ = ["Reductions"]

Finish = Callable[[Any], None]
"""Brings the result of a reduction into the gradient."""


class Reductions:
    """What a wrapped optimizer keeps: ``optimizer._hora``."""

    def __init__(
        self,
        optimizer: Any,
        *,
        base: Any,
        named_parameters: Any,
        compression: Any,
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.base = base
        self.compression = compression
        self.passes = passes
        self.op = op
        self.factors = (1.0 / predivide, predivide) if op is ReduceOp.Average else (1.0, 1.0)
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        # In an elastic job there may be others later.
        several = (process_set.size() or 1) > 1 or session("DistributedOptimizer").context.member is not None
        self.active = bool(process_set.included()) and several
        self.names: dict[torch.Tensor, str] = {}
        self.groups: dict[torch.Tensor, tuple[str, list[torch.Tensor]]] = {}
        self.delays: dict[torch.Tensor, int] = {}
        self.under_way: dict[torch.Tensor, tuple[Handle, Finish] | None] = {}
        self.hooked: set[torch.Tensor] = set()
        self.synchronized = False
        self.should_synchronize = True
        self.adopt(named(optimizer, named_parameters))
        members = split_groups(groups, list(self.names)) if groups is not None else []
        for group in members:
            name = f"group.{self.names[group[0]]}"
            self.groups.update(dict.fromkeys(group, (name, group)))

    def adopt(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take parameters in. Names that other optimizers reduce gradients under get a number more."""
        # By process set, as its members alone may have made the other optimizers.
        set_id = self.process_set.process_set_id or 0
        taken = session("DistributedOptimizer").optimizer_names
        number = max((taken.get((set_id, name), 0) for name, _ in pairs), default=0)
        for name, parameter in pairs:
            if self.active:
                taken[set_id, name] = number + 1
            self.names[parameter] = f"{name}#{number}" if number else name
            self.delays[parameter] = self.passes
            self.hook(parameter)

    def hook(self, parameter: torch.Tensor) -> None:
        """Watch a parameter's gradient, unless it is frozen; it may thaw later."""
        if self.active and self.op is not ReduceOp.Adasum and parameter.requires_grad:
            self.hooked.add(parameter)
            if parameter.grad is None:
                blank = parameter.grad = torch.zeros_like(parameter)  # as Horovod leaves it
                _give_way(parameter, blank)
            hook = functools.partial(_on_gradient, weakref.ref(self))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def base_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        return self.base.step(optimizer) if closure is None else self.base.step(optimizer, closure)

    def reset(self) -> None:
        self.under_way.clear()
        self.synchronized = False
        self.delays = dict.fromkeys(self.delays, self.passes)

    # --- reducing -------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        if self.delays[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step={self.passes} times before "
                "step() or synchronize(). Set it to the number of passes per step."
            )
        self.delays[parameter] -= 1
        if self.delays[parameter] > 0:
            self.under_way[parameter] = None
        elif parameter in self.groups:
            self.under_way[parameter] = None
            name, group = self.groups[parameter]
            if all(self.delays[member] == 0 or not member.requires_grad for member in group):
                self.reduce_group(name, group)
        else:
            self.under_way[parameter] = self.reduce(parameter)

    def reduce(self, parameter: torch.Tensor) -> tuple[Handle, Finish]:
        """Start the reduction of one gradient; zeros take the place of one that is missing."""
        gradient = self.gradient(parameter)
        name = self.names[parameter]
        if gradient.is_sparse:
            return sparse_allreduce_async(gradient, name=name, op=self.op, process_set=self.process_set), (
                lambda result: setattr(parameter, "grad", result)
            )
        packed, context = self.compression.compress(gradient)
        before, after = self.factors
        handle = allreduce_async_(
            packed,
            name=name,
            op=self.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        return handle, self.into(parameter, gradient, context)

    def reduce_group(self, name: str, group: list[torch.Tensor]) -> None:
        gradients = [self.gradient(parameter) for parameter in group]
        packed = [self.compression.compress(gradient) for gradient in gradients]
        before, after = self.factors
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in packed],
            name=name,
            op=self.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        finishes = [
            self.into(parameter, gradient, context)
            for parameter, gradient, (_, context) in zip(group, gradients, packed, strict=True)
        ]

        def finish(results: list[torch.Tensor]) -> None:
            for into, result in zip(finishes, results, strict=True):
                into(result)

        for parameter in group:
            self.under_way[parameter] = None
            self.delays[parameter] = 0
        self.under_way[group[0]] = handle, finish

    def into(self, parameter: torch.Tensor, gradient: torch.Tensor, context: Any) -> Finish:
        own = parameter.grad
        sparse_dimensions = own.sparse_dim() if own is not None and own.is_sparse else 0

        def finish(result: torch.Tensor) -> None:
            restored = self.compression.decompress(result, context)
            if sparse_dimensions:
                # What was reduced densely comes back sparse, in the same form, so that the next gradient can
                # be added: SparseAdam takes nothing else.
                parameter.grad = restored.to_sparse(sparse_dimensions)
            elif restored.data_ptr() != gradient.data_ptr():
                with torch.no_grad():
                    gradient.copy_(restored)

        return finish

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is to be reduced; zeros where there is no gradient."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse and self.sparse_as_dense:
            return parameter.grad.to_dense()
        return parameter.grad

    def finish_all(self) -> None:
        """Reduce what has not been, and wait for all of it."""
        if self.active:
            lent = []
            for parameter in self.names:
                if parameter not in self.hooked:
                    self.hook(parameter)
                if parameter not in self.hooked or self.under_way.get(parameter) is not None:
                    continue
                if parameter.grad is None and not parameter.requires_grad:
                    lent.append(parameter)  # frozen since: it takes part, and stays without a gradient
                if parameter in self.groups:
                    name, group = self.groups[parameter]
                    if self.under_way.get(group[0]) is None:
                        self.reduce_group(name, group)
                else:
                    self.under_way[parameter] = self.reduce(parameter)
            started_all, self.under_way = [entry for entry in self.under_way.values() if entry], {}
            for handle, finish in started_all:
                finish(synchronize(handle))
            for parameter in lent:
                parameter.grad = None
            self.delays = dict.fromkeys(self.delays, self.passes)
        self.synchronized = True

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        self.should_synchronize = False
        try:
            yield
        finally:
            self.should_synchronize = True

    def mean(self, loss: Any) -> Any:
        """A closure's loss over all ranks, so that all of them take the same line search."""
        if not isinstance(loss, torch.Tensor):
            return loss
        op = ReduceOp.Sum if self.op is ReduceOp.Sum else ReduceOp.Average
        return allreduce(loss.detach(), op=op, process_set=self.process_set)


def _give_way(parameter: torch.Tensor, blank: torch.Tensor) -> None:
    """Let a sparse gradient take the place of the first zeros: added to them it would become dense, which
    optimizers of sparse gradients refuse.
    """

    def before(gradient: torch.Tensor) -> None:
        handle.remove()
        if gradient.is_sparse and parameter.grad is blank:
            parameter.grad = None

    handle = parameter.register_hook(before)  # type: ignore[no-untyped-call]


def _on_gradient(owner: weakref.ref[Reductions], parameter: torch.Tensor) -> None:
    """The hook of a parameter, which outlives the optimizer."""
    shared = owner()
    if shared is not None:
        shared.on_gradient(parameter)

"""Horovod's ``DistributedOptimizer``: gradients are reduced one by one, by name, while backward runs.

It differs from ``hora.torch.DistributedOptimizer`` where Horovod's form is a choice: several backward
passes are summed, a parameter without a gradient takes part with zeros, ``step()`` after
``synchronize()`` reduces a second time unless told not to.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.ops import ReduceOp
from hora.torch._changes import Changes
from hora.torch._compression import Compression, Compressor
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch.horovod._arguments import check_arguments
from hora.torch.horovod._operations import (
    allreduce_async_,
    by_number,
    synchronize,
)
from hora.torch.horovod._reductions import Reductions
from hora.torch.horovod._session import session

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, with the same state, whose step uses gradients of all ranks.

    Args:
        optimizer: any optimizer of ``torch.optim`` or derived from ``torch.optim.Optimizer``.
        named_parameters: names for all its parameters, as of ``model.named_parameters()``.
        compression: how gradients travel, such as ``Compression.fp16``.
        backward_passes_per_step: gradients of so many passes are summed and then reduced.
        op: ``Average``, ``Sum`` or ``Adasum``; the last reduces the changes of the weights instead.
        gradient_predivide_factor: for ``Average``, divides before the sum by this, and after it by the rest.
        num_groups: deprecated, see ``groups``.
        groups: reduce gradients in so many groups, or in these lists of parameters, each as one operation.
        sparse_as_dense: turn sparse gradients into dense ones first.
        process_set: the ranks that share their gradients; for others it is the plain optimizer.

    Raises:
        ValueError: names that are missing, doubled or malformed, or another argument that cannot be.
    """
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; write groups=.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    op = by_number(op)
    adasum = op is ReduceOp.Adasum and (process_set.size() or 1) > 1
    base = _DistributedAdasumOptimizer if adasum else _DistributedOptimizer
    kind: Any = type(type(optimizer).__name__, (type(optimizer),), dict(vars(base)))
    wrapped = kind.__new__(kind)
    # Sharing the dictionary's contents keeps state, hooks and schedulers of the optimizer as they are; a
    # scheduler's patch of step() on the instance would hide ours.
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    _prepare(
        wrapped,
        named_parameters,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return wrapped


def _prepare(
    wrapped: Any,
    named_parameters: Any,
    *,
    compression: Any,
    passes: int,
    op: ReduceOp,
    predivide: float = 1.0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give an optimizer of a wrapping class what its methods need."""
    check_arguments(
        backward_passes_per_step=passes, op=op, gradient_predivide_factor=predivide, groups=groups
    )
    session("DistributedOptimizer")
    wrapped._hora = Reductions(
        wrapped,
        base=type(wrapped).__base__,
        named_parameters=named_parameters,
        compression=compression,
        passes=passes,
        op=op,
        predivide=predivide,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


class _DistributedOptimizer(Optimizer):
    """Methods of the wrapped optimizer's class.

    Private in Horovod, but some scripts make a class of their own from its dictionary,
    ``type(name, (SGD,), dict(_DistributedOptimizer.__dict__))``, and give that the parameter groups of an
    optimizer and the further arguments of :func:`DistributedOptimizer`.
    """

    _hora: Reductions

    def __init__(  # noqa: PLR0917 - Horovod's
        self,
        params: Any,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: type[Compressor] | Compressor,
        backward_passes_per_step: int = 1,
        op: ReduceOp = ReduceOp.Average,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        _plain(self).__init__(self, params)
        _prepare(
            self,
            named_parameters,
            compression=compression,
            passes=backward_passes_per_step,
            op=by_number(op),
            predivide=gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Then clip or unscale them, and ``step()`` inside
        ``skip_synchronize()``.
        """
        self._hora.finish_all()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``step()`` uses the gradients as they are: after ``synchronize()``."""
        return self._hora.skipping()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum so many backward passes from now on."""
        self._hora.passes = passes
        self._hora.delays = dict.fromkeys(self._hora.delays, passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients and update the parameters.

        A closure is evaluated with reduced gradients each time that the optimizer calls it, and its loss is
        the ranks' mean.
        """
        shared = self._hora
        if closure is not None and shared.active and shared.should_synchronize:
            if shared.under_way:
                shared.finish_all()

            def reduced() -> Any:
                loss = closure()
                shared.finish_all()
                return shared.mean(loss)

            result = shared.base_step(self, reduced)
        else:
            if shared.should_synchronize:
                if shared.synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after "
                        "optimizer.synchronize(): all gradients are reduced a second time. Write "
                        "`with optimizer.skip_synchronize(): optimizer.step()`.",
                        stacklevel=2,
                    )
                shared.finish_all()
            result = shared.base_step(self, closure)
        shared.synchronized = False
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own.

        Raises:
            AssertionError: reductions are under way, whose results would be lost.
        """
        if self._hora.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(), while gradients are being reduced. Call it before backward()."
            )
        self._hora.base.zero_grad(self, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters are reduced too."""
        _plain(self).add_param_group(self, param_group)
        if hasattr(self, "_hora"):  # else the class's own constructor adds the first ones
            number = len(self.param_groups) - 1
            fresh = self.param_groups[-1]["params"]
            self._hora.adopt([(f"noname.{number}.{at}", parameter) for at, parameter in enumerate(fresh)])

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's own; reductions under way are forgotten."""
        self._hora.reset()
        self._hora.should_synchronize = True
        self._hora.base.load_state_dict(self, state_dict)


class _DistributedAdasumOptimizer(Optimizer):
    """Each rank takes its own step; the changes of the weights are combined by Adasum."""

    _hora: Reductions

    def __init__(
        self,
        params: Any,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: type[Compressor] | Compressor,
        backward_passes_per_step: int = 1,
    ) -> None:
        _plain(self).__init__(self, params)
        _prepare(
            self,
            named_parameters,
            compression=compression,
            passes=backward_passes_per_step,
            op=ReduceOp.Adasum,
        )

    set_backward_passes_per_step = _DistributedOptimizer.set_backward_passes_per_step
    zero_grad = _DistributedOptimizer.zero_grad
    add_param_group = _DistributedOptimizer.add_param_group
    load_state_dict = _DistributedOptimizer.load_state_dict

    def synchronize(self) -> None:
        """Nothing: the changes of the weights are reduced in ``step()``."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Refused.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "skip_synchronize() has no meaning with op=Adasum: step() reduces changes of weights."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by the combined changes of all ranks."""
        shared = self._hora
        changes = Changes(list(shared.names))
        result = shared.base_step(self, closure)

        def combine(own: list[torch.Tensor]) -> list[torch.Tensor]:
            started = []
            for name, change in zip(shared.names.values(), own, strict=True):
                packed, context = shared.compression.compress(change)
                handle = allreduce_async_(
                    packed, name=f"delta.{name}", op=shared.op, process_set=shared.process_set
                )
                started.append((handle, context))
            return [
                shared.compression.decompress(synchronize(handle), context) for handle, context in started
            ]

        changes.combine(combine)
        return result


def _plain(wrapped: Optimizer) -> Any:
    """The class of the optimizer that was wrapped."""
    return type(wrapped).__base__

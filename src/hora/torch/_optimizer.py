"""``DistributedOptimizer``: the user's optimizer, with gradients that are averaged over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.torch._adasum import check_adasum
from hora.torch._agree import require_same
from hora.torch._attachment import Attachment
from hora.torch._compression import Compression, Compressor
from hora.torch._context import required
from hora.torch._groups import Groups
from hora.torch._names import (
    NamedParameters,
    check_devices,
    check_unowned,
    claim,
    describe,
    named_parameters_of,
    place_of,
)
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._rules import GradientCompression, Rule
from hora.torch.shard._elementwise import scalar_keys
from hora.torch.shard._fully import spread_fully
from hora.torch.shard._methods import SpreadState
from hora.torch.shard._rule import ShardRule

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_classes: Any = WeakIdKeyDictionary()


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name, and its order of arguments
    optimizer: AnyOptimizer,
    named_parameters: NamedParameters | None = None,
    compression: Compressor | GradientCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_mb: float | None = None,
    shard: Literal["optimizer", "all"] | None = None,
) -> AnyOptimizer:
    """Let an optimizer step on gradients averaged over all ranks.

    Returns the optimizer it was given, changed in place: it stays an instance of its class, keeps its
    state and ``state_dict``, and learning-rate schedulers work whether made before or after. Gradients
    are averaged in flat buckets while backward is running. When ``loss.backward()`` returns, ``grad``
    is the average over all ranks, so that clipping, ``GradScaler`` and accumulation over several
    backward passes need no extra call. ``step(closure)`` averages inside the closure, and the loss that
    it returns too, so that line searches take the same decisions everywhere.

    A parameter without a gradient on this rank counts as zero here; without one on every rank it keeps
    ``grad`` None. With one worker nothing is added.

    Every rank makes the same number of backward passes per step, and freezes the same parameters.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: a module, or pairs such as ``model.named_parameters()``; gives the names in
            messages, and the order of the buckets until the first backward has shown one. It covers exactly
            the parameters of ``optimizer``; of a module, frozen parameters may be outside.
        compression: how gradients travel: ``Compression.fp16`` or ``bf16``, ``PowerSGD()`` or ``TopK()``.
        backward_passes_per_step: with more than 1, gradients add up over so many backward passes and are
            reduced in the last, as the mean of the passes; fewer are reduced by ``step()``. With 1, each
            backward is reduced, and several add up as in plain torch.
        op: ``Average``, ``Sum``, or ``Adasum``: each rank steps with its own gradients, and the changes of
            the parameters are combined by Adasum; on 1, 2, 4, 8, ... ranks.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the average after.
        num_groups: older word for a number as ``groups``.
        groups: parameters whose gradients travel together, in one bucket of any size: lists of parameters, or
            the number of groups to make of all. Others are put into buckets of ``bucket_mb``.
        sparse_as_dense: makes sparse gradients dense, rather than refusing them.
        process_set: the ranks that average; on others the optimizer steps on its own gradients.
        bucket_mb: size of the buckets in MB; the setting ``HORA_BUCKET_MB`` if None. If that is none too, the
            first steps find out which is fastest, where that cannot change results (shared memory), else 25.
        shard: ``"optimizer"`` spreads the optimizer's state over the ranks: each updates its share of the
            parameters, with the results of an optimizer that is not sharded. ``grad`` is a ``GradientShare``
            then, and every rank calls ``state_dict()``. ``"all"`` spreads the parameters too, by
            ``torch.distributed.fsdp.fully_shard``.

    Raises:
        CollectiveError: Adasum on 3, 5, 6, ... ranks, or of parameters that are not floating.
        GradientError: parameters that are missing, repeated, averaged by another optimizer already, or
            differ between ranks, or a group that holds others, or what does not go with ``shard``. Later:
            sparse gradients, ``backward(create_graph=True)``, or ranks that make different numbers of
            backward passes.
    """
    context = required("DistributedOptimizer")
    if not isinstance(optimizer, Optimizer):
        raise GradientError(
            f"DistributedOptimizer takes an optimizer, not {type(optimizer).__name__}.",
            fix="Write DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).",
        )
    if isinstance(optimizer, _Distributed):
        raise GradientError(
            "This optimizer is distributed already.", fix="Call DistributedOptimizer once per optimizer."
        )
    chosen = Groups(num_groups, groups)
    rule = Rule(
        process_set=process_set,
        op=op,
        passes=backward_passes_per_step,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        compression=compression,
    )
    rule.check()
    if shard not in (None, "optimizer", "all"):
        raise GradientError(
            f"shard={shard!r} is not known.", fix='Write shard="optimizer" or shard="all", or leave it out.'
        )
    if process_set.included() is None:
        member_set(process_set, function="DistributedOptimizer")
    if bucket_mb is None:
        bucket_mb = context.settings.bucket_mb
    if shard == "all":
        grouped = bool(num_groups or groups)
        named = spread_fully(optimizer, named_parameters, rule, grouped=grouped, context=context)
    else:
        named = named_parameters_of(optimizer, named_parameters)
    check_unowned(named)
    check_devices(named, context)
    chosen.check_known(named)
    if op is ReduceOp.Adasum:
        for dtype in {parameter.dtype for _, parameter in named}:
            check_adasum(dtype, rule.members, function="DistributedOptimizer")
    scalars: set[str] | None = None
    if shard == "optimizer":
        rule = ShardRule.of(rule)
        scalars = scalar_keys(optimizer)
    if process_set.included():
        require_same(
            _descriptions(named, chosen, shard=shard),
            context,
            function="DistributedOptimizer",
            what="The parameters of the optimizer",
            fix="Build the same model and optimizer on every rank, whatever its rank is.",
            error=GradientError,
            process_set=process_set,
        )
    plain = type(optimizer)
    attachment = Attachment(
        optimizer,
        context,
        named,
        bucket_mb=bucket_mb,
        rule=rule,
        groups=chosen,
        scalars=scalars,
        fully=shard == "all" and context.world.size > 1,
        module=named_parameters,
    )
    distributed: Any = _distributed_class(plain)
    optimizer.__class__ = distributed
    vars(optimizer)["_hora"] = attachment
    attachment.watch(optimizer)
    return optimizer


class _Distributed(SpreadState):
    """Methods that every distributed optimizer has on top of those of its class."""

    _hora: Attachment

    def synchronize(self) -> None:
        """Average gradients that no backward has averaged, such as those set by hand.

        After ``loss.backward()`` there is nothing left to do; it is here for scripts written for
        Horovod.
        """
        if self._hora.reducer is not None:
            self._hora.reducer.before_step()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing: ``step()`` after ``synchronize()`` averages nothing again.

        It is here for scripts written for Horovod.
        """
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``torch.optim.Optimizer``."""
        if self._hora.reducer is not None:
            self._hora.reducer.before_zero()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim.Optimizer``; every rank adds the same group."""
        if self._hora.fully:
            raise GradientError(
                "add_param_group() came after shard='all' had spread the model.",
                fix="Give the optimizer all parameters before DistributedOptimizer; freeze those that come "
                "later with requires_grad_(False).",
            )
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        number = len(groups) - 1
        added = [(place_of(number, index), parameter) for index, parameter in enumerate(groups[-1]["params"])]
        check_unowned(added)
        if self._hora.process_set.included():
            require_same(
                [describe(name, parameter) for name, parameter in added],
                self._hora.context,
                function="add_param_group",
                what="The parameters of the added group",
                fix="Add the same group on every rank.",
                error=GradientError,
                process_set=self._hora.process_set,
            )
        claim(self, added)
        if self._hora.shards is not None:
            self._hora.shards.add(self, added)  # type: ignore[arg-type]
        elif self._hora.reducer is not None:
            self._hora.reducer.add(added)


def _descriptions(named: list[tuple[str, torch.Tensor]], groups: Groups, *, shard: str | None) -> list[str]:
    numbers = groups.numbers(named)
    return [
        describe(name, parameter)
        + (f" of group {numbers[id(parameter)]}" if id(parameter) in numbers else "")
        + (f" with shard={shard!r}" if shard else "")
        for name, parameter in named
    ]


def _distributed_class(plain: type[Optimizer]) -> type[Optimizer]:
    found: type[Optimizer] | None = _classes.get(plain)
    if found is None:
        namespace = {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            "__qualname__": plain.__qualname__,
        }
        found = type(plain.__name__, (_Distributed, plain), namespace)
        _classes[plain] = found
    return found

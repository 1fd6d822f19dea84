"""``DistributedOptimizer``: the user's optimizer, with gradients that are averaged over the ranks."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from hora.core.errors import GradientError
from hora.torch._agree import require_same
from hora.torch._collectives import allreduce
from hora.torch._compression import Compression, Compressor
from hora.torch._context import Context, required
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._reducer import Reducer
from hora.torch._request import ReduceOp
from hora.torch._rules import GradientCompression, Rule

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
NamedParameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

_owners: Any = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the optimizer that averages its gradient."""

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
        named_parameters: a module, or pairs such as ``model.named_parameters()``; gives the order of the
            buckets and the names in messages. It covers exactly the parameters of ``optimizer``; of a
            module, frozen parameters may be outside.
        compression: how gradients travel: ``Compression.fp16`` or ``bf16``, ``PowerSGD()`` or ``TopK()``.
        backward_passes_per_step: with more than 1, gradients add up over so many backward passes and are
            reduced in the last, as the mean of the passes; fewer are reduced by ``step()``. With 1, each
            backward is reduced, and several add up as in plain torch.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the average after.
        num_groups: accepted for scripts written for Horovod, as ``groups`` is: the buckets already carry many
            gradients in one message.
        groups: see ``num_groups``.
        sparse_as_dense: makes sparse gradients dense, rather than refusing them.
        process_set: the ranks that average; on others the optimizer steps on its own gradients.
        bucket_mb: size of the buckets in MB; the setting ``HORA_BUCKET_MB`` if None.

    Raises:
        GradientError: parameters that are missing, repeated, averaged by another optimizer already, or
            differ between ranks. Later: sparse gradients, ``backward(create_graph=True)``, or ranks that
            make different numbers of backward passes.
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
    _check_groups(num_groups, groups)
    rule = Rule(
        process_set=process_set,
        op=op,
        passes=backward_passes_per_step,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        compression=compression,
    )
    rule.check()
    if process_set.included() is None:
        member_set(process_set, function="DistributedOptimizer")
    if bucket_mb is None:
        bucket_mb = context.settings.bucket_mb
    named = _named(optimizer, named_parameters)
    _check_unowned(named)
    _check_devices(named, context)
    if process_set.included():
        require_same(
            [_description(name, parameter) for name, parameter in named],
            context,
            function="DistributedOptimizer",
            what="The parameters of the optimizer",
            fix="Build the same model and optimizer on every rank, whatever its rank is.",
            error=GradientError,
            process_set=process_set,
        )
    distributed: Any = _distributed_class(type(optimizer))
    optimizer.__class__ = distributed
    vars(optimizer)["_hora"] = _Attachment(optimizer, context, named, bucket_mb=bucket_mb, rule=rule)
    if context.watch is not None:
        context.watch.distributed(optimizer, named, named_parameters, rule, vars(optimizer)["_hora"].reducer)
    return optimizer


class _Attachment:
    """What is added to one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        context: Context,
        named: list[tuple[str, torch.Tensor]],
        *,
        bucket_mb: float,
        rule: Rule,
    ) -> None:
        self.context = context
        self.process_set = rule.process_set
        self.names = {id(parameter): name for name, parameter in named}
        self.reducer: Reducer | None = None
        _own(optimizer, named)
        if rule.size == 1 and rule.passes == 1:
            return
        self.reducer = Reducer(context, named, bucket_mb=bucket_mb, rule=rule)
        weakref.finalize(optimizer, self.reducer.remove_hooks).atexit = False
        # step() goes through these hooks even where a scheduler has wrapped the method before.
        reducer = weakref.ref(self.reducer)
        optimizer.register_step_pre_hook(functools.partial(_before_step, reducer))
        optimizer.register_step_post_hook(functools.partial(_after_step, reducer))


class _Distributed:
    """Methods that every distributed optimizer has on top of those of its class."""

    _hora: _Attachment

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
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        number = len(groups) - 1
        added = [(_place(number, index), parameter) for index, parameter in enumerate(groups[-1]["params"])]
        _check_unowned(added)
        if self._hora.process_set.included():
            require_same(
                [_description(name, parameter) for name, parameter in added],
                self._hora.context,
                function="add_param_group",
                what="The parameters of the added group",
                fix="Add the same group on every rank.",
                error=GradientError,
                process_set=self._hora.process_set,
            )
        _own(self, added)
        if self._hora.reducer is not None:
            self._hora.reducer.add(added)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Copies and pickles are plain optimizers: their parameters are other tensors.
        plain = type(self).__mro__[2]
        return copyreg._reconstructor, (plain, object, None), self.__getstate__()  # type: ignore[attr-defined]


def _check_groups(num_groups: object, groups: object) -> None:
    listed = isinstance(groups, Sequence) and not any(isinstance(group, str) for group in groups)
    counts = [count for count in (num_groups, groups) if isinstance(count, int) and count >= 0]
    if not (
        isinstance(num_groups, int)
        and num_groups in counts
        and (groups is None or listed or groups in counts)
    ):
        raise GradientError(
            f"num_groups={num_groups!r} and groups={groups!r} are neither numbers nor lists of parameters.",
            fix="Leave them out: gradients are grouped in buckets anyway.",
        )


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


def _named(optimizer: Optimizer, given: NamedParameters | None) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters in order of registration, checked against the optimizer's."""
    own = [
        (_place(number, index), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    if given is None:
        return own
    is_module = isinstance(given, torch.nn.Module)
    pairs = list(given.named_parameters()) if isinstance(given, torch.nn.Module) else list(given)
    inside = {id(parameter) for _, parameter in own}
    named: list[tuple[str, torch.Tensor]] = []
    seen: dict[int, str] = {}
    names: set[str] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise GradientError(
                f"named_parameters holds {type(pair).__name__}, not pairs of a name and a tensor.",
                fix="Write named_parameters=model.named_parameters(), or pass the model.",
            )
        name, parameter = pair
        if name in names or id(parameter) in seen:
            raise GradientError(
                f"named_parameters holds {name!r} twice"
                + ("." if name in names else f": it is the same tensor as {seen[id(parameter)]!r}."),
                fix="Give each parameter once, under its own name.",
            )
        names.add(name)
        seen[id(parameter)] = name
        if id(parameter) in inside:
            named.append((name, parameter))
        elif not is_module or parameter.requires_grad:
            raise GradientError(
                f"{name!r} is in named_parameters but not in the optimizer, which would never change it.",
                fix="Give the optimizer all of model.parameters(), or give DistributedOptimizer only the "
                "(name, parameter) pairs that this optimizer has.",
            )
    missing = [(place, parameter) for place, parameter in own if id(parameter) not in seen]
    if missing:
        place, parameter = missing[0]
        raise GradientError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters; the first is {place}, "
            f"of shape {tuple(parameter.shape)}.",
            fix="Name the parameters of all modules that the optimizer trains, or leave them out.",
        )
    return named


def _place(group: int, index: int) -> str:
    return f"parameter {index} of group {group}"


def _description(name: str, parameter: torch.Tensor) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{name} ({str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}{frozen})"


def _check_unowned(named: list[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in named:
        owner = _owners.get(parameter)
        if owner is not None and owner() is not None:
            raise GradientError(
                f"The gradient of {name} is averaged by another DistributedOptimizer already.",
                fix="Delete the other one first (del optimizer), or put its parameters into one optimizer.",
            )


def _check_devices(named: list[tuple[str, torch.Tensor]], context: Context) -> None:
    for name, parameter in named:
        if parameter.device.type not in context.devices:
            raise GradientError(
                f"{name} is on {parameter.device}; the engines of this job take "
                f"{' and '.join(sorted(context.devices))}.",
                fix="Move the model first: model.to(hora.device()); a meta model with "
                "model.to_empty(device=hora.device()).",
            )


def _own(optimizer: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    for _, parameter in named:
        _owners[parameter] = weakref.ref(optimizer)


def _before_step(
    reference: weakref.ref[Reducer], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    reducer = reference()
    assert reducer is not None, "the optimizer owns it"
    # The arguments of step() come with the optimizer itself in front.
    if kwargs.get("closure") is not None:
        return args, kwargs | {"closure": _averaging(kwargs["closure"], reducer)}
    if len(args) > 1 and args[1] is not None:
        return (args[0], _averaging(args[1], reducer), *args[2:]), kwargs
    reducer.before_step()
    return None


def _after_step(
    reference: weakref.ref[Reducer], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.after_step()


def _averaging(closure: Callable[[], Any], reducer: Reducer) -> Callable[[], Any]:
    """The closure, with its gradients and its loss averaged over the ranks."""

    @functools.wraps(closure)
    def averaged() -> Any:
        reducer.begin_evaluation()
        loss = closure()
        reducer.before_step()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return allreduce(loss.detach(), process_set=reducer.process_set)
        if isinstance(loss, float):
            number = torch.tensor(loss, dtype=torch.float64, device=reducer.control)
            return float(allreduce(number, process_set=reducer.process_set))
        return loss

    return averaged

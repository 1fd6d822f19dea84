"""What ``DistributedOptimizer`` adds to one optimizer, anew in each world of an elastic job."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.torch._changes import LocalSteps
from hora.torch._context import Context, after_init
from hora.torch._groups import Groups
from hora.torch._names import claim
from hora.torch._reducer import Reducer
from hora.torch._rules import Rule
from hora.torch._state import broadcast_optimizer_state
from hora.torch._tuning import FIRST
from hora.torch.shard._inner import stand_in
from hora.torch.shard._rule import ShardRule
from hora.torch.shard._shards import Shards

__all__ = ["Attachment"]


class Attachment:
    """What is added to one optimizer.

    Attributes:
        number: of the optimizer, among those that work over all ranks; None for others.
        optimizer: weak reference to it.
        fully: whether torch's ``fully_shard`` averages the gradients.
        loaded: the whole state that a sharded optimizer was given last, until its next step.
        shards: the ranks' shares of the optimizer, if it is sharded.
    """

    reducer: Reducer | None
    loaded: dict[str, Any] | None
    steps: LocalSteps | None
    shards: Shards | None

    def __init__(
        self,
        optimizer: Optimizer,
        context: Context,
        named: list[tuple[str, torch.Tensor]],
        *,
        bucket_mb: float | None,
        rule: Rule,
        groups: Groups,
        scalars: set[str] | None,
        fully: bool,
        module: object,
    ) -> None:
        self.fully = fully
        self.process_set = rule.process_set
        self.optimizer = weakref.ref(optimizer)
        self._named, self._rule, self._groups, self._scalars = named, rule, groups, scalars
        self._bucket_mb = bucket_mb
        self._plain = type(optimizer)  # its class is changed afterwards
        self._module = weakref.ref(module) if isinstance(module, torch.nn.Module) else lambda: None
        self._undo: list[Callable[[], None]] = []
        claim(optimizer, named)
        weakref.finalize(optimizer, _undo_all, self._undo).atexit = False
        self._join(optimizer, context)
        self.loaded = None
        self._parted = False
        self._hooked = False
        if self.reducer is not None or self.steps is not None or context.member is not None:
            self._hook(optimizer)
        if context.member is not None:
            _elastic.append(weakref.ref(self))

    def begin_turn(self, weight: float, *, index: int, count: int) -> None:
        """Gradients of micro-batches are to be added up, by a worker that is alone too."""
        optimizer = self.optimizer()
        if count == 1 or self.reducer is not None or optimizer is None:
            return
        if self.fully:
            raise GradientError(
                "micro_batch= does not go with shard='all': fully_shard reduces the gradients of each "
                "backward pass by itself.",
                fix="Leave out micro_batch=, or write shard='optimizer'.",
            )
        self._reduce(FIRST if self._bucket_mb is None else self._bucket_mb)
        self._hook(optimizer)

    def _hook(self, optimizer: Optimizer) -> None:
        """Go through step(), even where a scheduler has wrapped the method before."""
        if not self._hooked:
            self._hooked = True
            attachment = weakref.ref(self)
            optimizer.register_step_pre_hook(functools.partial(_before_step, attachment))
            optimizer.register_step_post_hook(functools.partial(_after_step, attachment))

    @property
    def spread(self) -> bool:
        """Whether the optimizer was made with ``shard=``, so that several ranks each have a part of it."""
        return self._scalars is not None or self.fully

    def rejoin(self, context: Context) -> None:
        """There is another world of the elastic job."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        self.drop()
        if self._parted:
            self._put_together(optimizer)
        self._join(optimizer, context)
        self.watch(optimizer)

    def _put_together(self, optimizer: Optimizer) -> None:
        """Each rank had its share of the state in the world that has ended; now it is whole again."""
        state, self.loaded, self._parted = self.loaded, None, False
        if state is None and optimizer.state:
            raise GradientError(
                "The optimizer's state was spread over the workers of a world that has ended, and nothing "
                "has loaded it since.",
                fix="Let state.restore() load what optimizer.state_dict() returned at the last commit, as "
                "hora.elastic.TorchState does.",
            )
        optimizer.state.clear()
        if state is not None:
            optimizer.load_state_dict(state)

    def share_out(self, optimizer: Optimizer, state: dict[str, Any] | None, root: int) -> None:
        """Give all ranks the whole state that ``root`` has, and each its share. Every rank calls it."""
        parameters = [group["params"] for group in optimizer.param_groups]
        plain = stand_in(optimizer, self._plain, parameters, collections.defaultdict(dict))
        for hooks in ("pre", "post"):
            vars(plain)[f"_optimizer_load_state_dict_{hooks}_hooks"] = collections.OrderedDict()
        if self.context.world.rank == root:
            assert state is not None, "it has committed"
            plain.load_state_dict(copy.deepcopy(state))
        broadcast_optimizer_state(plain, root)
        optimizer.load_state_dict(plain.state_dict())

    def drop(self) -> None:
        """The world ends: give up what belongs to its engine."""
        _undo_all(self._undo)
        self._parted |= self.shards is not None
        for _, parameter in self._named:
            parameter.grad = None  # of a step that will be made anew; it may lie in the engine's memory
        self.reducer, self.steps, self.shards = None, None, None

    @property
    def rule(self) -> Rule:
        """How gradients are reduced."""
        return self._rule

    def step_apart(self) -> None:
        """Between two steps, on every rank: from now on each steps by its own gradients."""
        optimizer = self.optimizer()
        if self._rule.apart or optimizer is None:
            return
        self.drop()
        self._rule = dataclasses.replace(self._rule, apart=True)
        self._join(optimizer, self.context)
        if self.context.watch is not None:
            self.context.watch.step_apart(optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """Let the guard look at it."""
        if self.context.watch is not None:
            module: Any = self._module()
            self.context.watch.distributed(optimizer, self._named, module, self._rule, self.reducer)

    def _join(self, optimizer: Optimizer, context: Context) -> None:
        named, rule, groups, scalars = self._named, self._rule, self._groups, self._scalars
        bucket_mb = self._bucket_mb
        self.context = context
        if context.member is not None:
            reference = weakref.ref(self)
            context.closing.append(lambda: _drop(reference))
        self.reducer = None
        self.steps = None
        self.shards = None
        self.number = context.presence.register(self, rule.process_set) if rule.members > 1 else None
        if rule.members > 1 and rule.op is ReduceOp.Adasum:
            self.steps = LocalSteps(context, rule, number=self.number)
        if isinstance(rule, ShardRule) and scalars is not None and rule.size > 1:
            self.shards = Shards(
                optimizer,
                context,
                named,
                plain=self._plain,
                scalars=scalars,
                bucket_mb=FIRST if bucket_mb is None else bucket_mb,
                rule=rule,
                groups=groups,
                number=self.number,
            )
            self.reducer = self.shards.reducer
        elif (rule.size > 1 or rule.passes > 1) and not self.fully:
            self._reduce(bucket_mb)
        if self.shards is not None:
            self._undo.append(self.shards.reducer.remove_hooks)
        context.turn.join(self)

    def _reduce(self, bucket_mb: float | None) -> None:
        self.reducer = Reducer(
            self.context,
            self._named,
            bucket_mb=bucket_mb,
            rule=self._rule,
            groups=self._groups,
            number=self.number,
        )
        self._undo.append(self.reducer.remove_hooks)

    def answer(self, what: str) -> None:
        """Take part in an operation of the ranks that have data, on one that has joined."""
        if self.steps is not None:
            optimizer = self.optimizer()
            assert optimizer is not None, "it owns this"
            self.steps.answer(optimizer)
        elif self.reducer is not None:
            self.reducer.answer(what)


_elastic: list[weakref.ref[Attachment]] = []
"""Of an elastic job, in the order in which they were made: all ranks number them alike in each world."""


def _rejoin(context: Context) -> None:
    _elastic[:] = [reference for reference in _elastic if reference() is not None]
    for reference in _elastic:
        attachment = reference()
        if attachment is not None:
            attachment.rejoin(context)


after_init.append(_rejoin)


def _drop(reference: weakref.ref[Attachment]) -> None:
    attachment = reference()
    if attachment is not None:
        attachment.drop()


def _undo_all(calls: list[Callable[[], None]]) -> None:
    while calls:
        calls.pop()()


def _before_step(
    reference: weakref.ref[Attachment], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    attachment = reference()
    assert attachment is not None, "the optimizer owns it"
    if attachment.steps is not None:
        attachment.steps.before_step(optimizer)
    attachment.loaded = None
    reducer = attachment.reducer
    if reducer is None:
        return None
    # The arguments of step() come with the optimizer itself in front.
    shards, settle = attachment.shards, reducer.before_step
    if shards is not None:
        settle = shards.settle
        args = (shards.begin(optimizer), *args[1:])
    if kwargs.get("closure") is not None:
        return args, kwargs | {"closure": _averaging(kwargs["closure"], reducer, settle)}
    if len(args) > 1 and args[1] is not None:
        return (args[0], _averaging(args[1], reducer, settle), *args[2:]), kwargs
    settle()
    return args, kwargs


def _after_step(
    reference: weakref.ref[Attachment], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    attachment = reference()
    assert attachment is not None, "the optimizer owns it"
    if attachment.shards is not None:
        attachment.shards.finish(optimizer)
    if attachment.reducer is not None:
        attachment.reducer.after_step()
    if attachment.steps is not None:
        attachment.steps.after_step()


def _averaging(closure: Callable[[], Any], reducer: Reducer, settle: Callable[[], None]) -> Callable[[], Any]:
    """The closure, with its gradients and its loss averaged over the ranks."""

    @functools.wraps(closure)
    def averaged() -> Any:
        reducer.begin_evaluation()
        loss = closure()
        settle()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return torch.full_like(loss.detach(), reducer.mean(float(loss.detach())))
        return reducer.mean(loss) if isinstance(loss, float) else loss

    return averaged

"""Watches the training for the guard: small records of what each step did, for the supervisor to compare.

Hooks that torch calls at every optimizer's step take them. Nothing here calls a collective, waits for
another rank, or lets a fault of its own reach the training: then it says so once and is silent.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hora.adapter import records, watch
from hora.adapter.ops import ReduceOp
from hora.adapter.watch import here, unharmed
from hora.torch.watch import _gradients as gradients
from hora.torch.watch._group import Group, is_plain
from hora.torch.watch._inputs import Inputs
from hora.torch.watch._left_out import LeftOut
from hora.torch.watch._order import Orders
from hora.torch.watch._plan import Plan
from hora.torch.watch._prints import EARLY, Prints

if TYPE_CHECKING:
    from hora.torch._context import Context
    from hora.torch._loader import Loader
    from hora.torch._reducer import Reducer
    from hora.torch._rules import Rule

__all__ = ["Watch", "start"]


def start(context: Context) -> None:
    """Watch this job from now on, until its context closes."""
    if context.member is not None:  # the supervisor knows nothing of an earlier world
        _numbers.clear()
    context.watch = Watch(context)
    context.closing.append(context.watch.close)


_numbers: dict[str, int] = {}
"""Optimizers of each signature so far, over all ``init()``: the supervisor knows those of an earlier one."""


class Watch(watch.Watch):
    """The watch of one job on one rank.

    Attributes:
        losses: of the backward passes.
        groups: what is kept of each optimizer.
        modules: those that are trained.
    """

    def __init__(self, context: Context) -> None:
        assert context.guard is not None
        # A job may call init() again, and what it does after that is another training.
        super().__init__(
            context.guard.reporter,
            rank=context.world.rank,
            size=context.world.size,
            generation=context.generation,
        )
        self.timeline = context.timeline
        self.losses = gradients.Losses(context.guard)
        self.groups: weakref.WeakKeyDictionary[Optimizer, Group] = weakref.WeakKeyDictionary()
        self._latest: Callable[[], Group | None] = lambda: None
        self._pid = os.getpid()
        self._joins = 0
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.prints = Prints(self)
        self.plan = Plan(self)
        self.inputs = Inputs(self)
        self.left_out = LeftOut(self)
        self.orders = Orders(self)
        self._undo: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
            self.losses.install(),
            self.plan.install(),
            self.inputs.close,
            self.orders.install(),
        ]
        self.reporter.handlers["closely"] = self.prints.closely

    # --- what others tell it --------------------------------------------------------------------

    @unharmed
    def distributed(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        module: object,
        rule: Rule,
        reducer: Reducer | None,
    ) -> None:
        """An optimizer's gradients are averaged from now on."""
        process_set = rule.process_set
        members = process_set.members if process_set.included() else [self.rank]
        group = Group(optimizer, distributed=len(members) > 1, members=members, where=here())
        group.changes = rule.op is ReduceOp.Adasum
        group.name({id(parameter): name for name, parameter in named})
        if isinstance(module, torch.nn.Module):
            self.module(module)
            self.left_out.whole(module, group)
        self.plan.passes[optimizer] = rule.passes
        if reducer is not None and group.distributed:
            reducer.packed = functools.partial(_note_bucket, self, group)
        self._register(optimizer, group)

    @unharmed
    def step_apart(self, optimizer: Optimizer) -> None:
        """Replicas of a distributed optimizer part on purpose."""
        group = self.groups.get(optimizer)
        if group is not None:
            group.apart = True

    @unharmed
    def module(self, module: torch.nn.Module) -> None:
        """A module that is trained, or part of one that is."""
        self.modules.add(module)

    @unharmed
    def broadcast(self, parameters: object, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """These tensors are the same on all ranks from now on."""
        if isinstance(parameters, torch.nn.Module):
            self.module(parameters)
            self.left_out.broadcast(parameters)
        self.prints.broadcast(named)

    @unharmed
    def rejoined(self) -> None:
        """After ``join()`` all ranks have the same again, and have made different numbers of steps before.

        In the form for Horovod scripts they have what the script gives them before the next step.
        """
        self._joins += 1
        for optimizer, old in list(self.groups.items()):
            if old.averaged:
                self.prints.forget(old)
                del self.groups[optimizer]
            if not old.distributed:
                continue
            group, distributed = old.anew(), cast("Any", optimizer)
            reducer: Reducer | None = distributed._hora.reducer
            if reducer is not None:
                reducer.packed = functools.partial(_note_bucket, self, group)
            self._register(optimizer, group)

    def harmless(self, action: Callable[[], None]) -> None:
        """Do something of the watch's own inside a function of the user's."""
        _harmless(self, action)

    @unharmed
    def epoch(self, loader: Loader) -> None:
        """A loader of Hora's starts an epoch."""
        self.plan.own_loader(loader)
        self.orders.own_starts(loader)

    def handed_out(self, batch: Any) -> None:
        """A loader of Hora's gives this batch. What models are fed is seen when they are."""

    def fetched(self) -> None:
        """A loader of Hora's was asked for a batch."""
        self.plan.batches += 1
        self.orders.own_goes_on()

    # --- hooks ----------------------------------------------------------------------------------

    @unharmed
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(optimizer, "_hora_share", False):
            return  # a stand-in, inside the step of an optimizer that is watched
        group = self._group(optimizer) or self._meet(optimizer)
        outer = sys._getframe(2)  # that of the wrapper that torch has put around step()
        if group.frame is not None and _is_inside(outer, group.frame):
            return
        group.frame = outer
        group.closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if group.done:
            return
        if group.steps == 0:
            self.prints.begin(group)
        elif (group.after or group.steps < EARLY or group.closely > 0) and len(group.members) > 1:
            self.prints.look_between(group)
        if not group.planned and group.is_learning:
            group.planned = True
            self.plan.before_first_step(group, broadcast=self.prints.is_broadcast(group))
        if (group.apart or not group.distributed) and not group.closure:
            gradients.note_plain(group, self.losses)

    @unharmed
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self._group(optimizer)
        if group is None or sys._getframe(2) is not group.frame:
            return
        group.frame = None
        if "found_inf" in optimizer.__dict__ and gradients.is_skipped(optimizer):
            return
        group.steps += 1
        reporter, losses = self.reporter, self.losses
        self.stepped(group.steps)
        if group.done:  # its tensors are not watched, but a step is a step
            losses.stepped = losses.passes
            return
        if not group.distributed and group.closure:
            if group.steps == 1:
                group.adopt(self.inputs.roots())  # the model was called inside the step
            gradients.note_plain(group, losses)
        if group.pending or group.away or group.bad or not losses.is_fine:
            self._send_bad(group)
        losses.stepped = losses.passes
        if self.inputs.is_open:
            self.inputs.stepped(group)
        if not group.looked:
            gradients.look_for_idle(group, reporter)
        self.left_out.after_step(group)
        group.local.clear()
        if len(group.members) > 1:
            self.prints.after_step(group)

    # --- what it sends --------------------------------------------------------------------------

    def _group(self, optimizer: Optimizer) -> Group | None:
        """What is kept of an optimizer: mostly that which has stepped last."""
        group = self._latest()
        if group is None or group.reference() is not optimizer:
            group = self.groups.get(optimizer)
            if group is not None:
                self._latest = weakref.ref(group)
        return group

    def _meet(self, optimizer: Optimizer) -> Group:
        """An optimizer that Hora did not make steps for the first time."""
        shared = getattr(optimizer, "_hora", None)  # of the form for Horovod scripts
        names = getattr(shared, "names", None)
        averaging = bool(getattr(shared, "active", False))
        members = list(shared.process_set.members) if averaging and shared is not None else None
        group = Group(
            optimizer,
            distributed=False,
            members=range(self.size) if members is None else members,
            where=here(),
        )
        group.averaged = averaging
        group.changes = averaging and shared is not None and shared.op is ReduceOp.Adasum
        if isinstance(names, Mapping):
            group.name({id(parameter): str(name) for parameter, name in names.items()})
        self._register(optimizer, group)
        return group

    def _register(self, optimizer: Optimizer, group: Group) -> None:
        kind = "distributed" if group.distributed or group.averaged else "plain"
        # Some ranks may not have come to a first step before the last join.
        joins = self._joins if group.averaged else 0
        signature = f"{joins} {kind} {type(optimizer).__name__} {group.signature} {group.members}"
        number = _numbers[signature] = _numbers.get(signature, 0) + 1
        group.key = f"{self.generation} {signature} {number}"
        group.done = not all(is_plain(parameter) for parameter in group.parameters)
        self.groups[optimizer] = group
        self._latest = weakref.ref(group)
        self.left_out.hold(group.parameters)
        optimizer.register_load_state_dict_post_hook(_restored)

    def _send_bad(self, group: Group) -> None:
        bad = gradients.take_bad(group, self.losses)
        if bad is None:
            return
        self.reporter.send(
            records.not_finite(
                key=group.key,
                members=group.members if group.distributed or group.averaged else [self.rank],
                own=group.distributed or not group.averaged,
                step=group.steps,
                where=here(),
                bad=bad,
            )
        )

    def stops_for_now(self) -> None:
        """The job ends in the midst of the training: what each rank has kept for itself goes on with it."""
        self.prints.for_now = True

    def close(self) -> None:
        """The job ends: the last reports."""
        if os.getpid() == self._pid:
            self._close()
        self.stop()
        self.broken = True

    @unharmed
    def _close(self) -> None:
        for group in list(self.groups.values()):
            gradients.look_for_idle(group, self.reporter, last=True)
        self.prints.finish()
        self.plan.finish()

    def stop(self) -> None:
        """Undo what makes it see the training."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.reporter.handlers.pop("closely", None)
        self.prints.close()


_note_bucket = unharmed(gradients.note_bucket)


@unharmed
def _harmless(self: Watch, action: Callable[[], None]) -> None:
    action()


def _restored(optimizer: Optimizer) -> None:
    """Called by torch when an optimizer has loaded a state."""
    from hora.torch import _context

    watch = _context.current.context.watch if _context.current.context is not None else None
    group = watch.groups.get(optimizer) if watch is not None else None
    if group is not None:
        group.restored.append({"step": group.steps, "where": here()})


def _is_inside(frame: Any, outer: Any) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False

"""Reports the fingerprints of an optimizer's tensors at its steps, for the ranks' to be compared."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hora.adapter import records
from hora.adapter.prints import combined
from hora.torch.watch._digest import digests
from hora.torch.watch._group import Group, is_plain, shortened

if TYPE_CHECKING:
    from hora.torch.watch._watch import Watch

__all__ = ["Prints"]

EARLY = 8
"""Steps in which writes to parameters are looked for between each two."""

CLOSELY = 32
"""Steps in which a replica without averaged gradients may be brought together again by other means."""


class Prints:
    """Takes fingerprints and sends them.

    Attributes:
        for_now: whether the job ends in the midst of the training. Buffers that ranks keep for themselves
            are compared at its end only.
    """

    def __init__(self, watch: Watch) -> None:
        self.for_now = False
        self._watch = watch
        self._reporter = watch.reporter
        self._names: Any = WeakTensorKeyDictionary()
        self._broadcast: Any = WeakTensorKeyDictionary()
        self._memory: dict[int, int] = {}  # a state_dict holds other tensor objects with the same memory
        self._outbox: list[dict[str, Any]] = []
        self._finals: dict[str, weakref.finalize[Any, Any]] = {}

    def broadcast(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """These tensors are the same on all ranks from now on."""
        plain = [(name, tensor) for name, tensor in named if is_plain(tensor)]
        for (name, tensor), number in zip(plain, digests([tensor for _, tensor in plain]), strict=True):
            self._broadcast[tensor] = number
            self._names.setdefault(tensor, name)
            self._memory[tensor.data_ptr()] = number

    def after_step(self, group: Group) -> None:
        """After each step of an optimizer."""
        group.note_rates()
        if group.is_due() and not (group.changes or group.apart):
            self._print(group)
        if group.steps < EARLY:
            self._learn_writes(group)
        if self._outbox:
            self._flush()

    def finish(self) -> None:
        """The job ends: the last reports."""
        for final in list(self._finals.values()):
            final()
        self._flush()

    def forget(self, group: Group) -> None:
        """Make no last report of this optimizer."""
        final = self._finals.pop(group.key, None)
        if final is not None:
            final.detach()

    def close(self) -> None:
        """Report no more."""
        for final in self._finals.values():
            final.detach()
        self._finals.clear()

    def closely(self, record: Mapping[str, Any]) -> None:
        """The judge asks for the next steps of an optimizer, each."""
        for group in list(self._watch.groups.values()):
            if group.key == record["key"]:
                group.closely = CLOSELY

    def begin(self, group: Group) -> None:
        """Before an optimizer's first step."""
        group.name({id(p): self._names[p] for p in group.parameters if p in self._names})
        group.adopt([*self._watch.modules, *self._watch.inputs.roots()])
        optimizer = group.optimizer
        assert optimizer is not None
        if len(group.members) < 2 and self._watch.size > 1:
            return
        group.start = digests(group.parameters)
        if self._watch.size == 1:
            return
        since = [
            index
            for index, (parameter, number) in enumerate(zip(group.parameters, group.start, strict=True))
            if self._told(parameter) not in (None, number)
        ]
        seed = torch.initial_seed()
        self._reporter.send(
            records.replica(
                key=group.key,
                members=group.members,
                distributed=group.distributed or group.averaged,
                broadcast=self.is_broadcast(group),
                changed=since[:50],
                seed=seed if seed < 2**32 else None,
                restored=group.restored,
                names=group.names[:1000],
                optimizer=type(optimizer).__name__,
                where=group.where,
                together=self._together(group),
                stateful=any(optimizer.state.get(parameter) for parameter in group.parameters),
                parameters=shortened(group.start),
                state=shortened(group.states()),
                rates=group.rates(),
            )
        )
        group.restored = []
        owner = next((module for module in (known() for known in group.modules) if module is not None), None)
        final = weakref.finalize(owner if owner is not None else optimizer, self._finish, group)
        final.atexit = False
        self._finals[group.key] = final

    def is_broadcast(self, group: Group) -> bool:
        """Whether all parameters have been broadcast."""
        return all(self._told(parameter) is not None for parameter in group.parameters)

    def _told(self, parameter: torch.Tensor) -> int | None:
        """What a parameter was when it was broadcast."""
        number: int | None = self._broadcast.get(parameter)
        return self._memory.get(parameter.data_ptr()) if number is None else number

    def _together(self, group: Group) -> str | None:
        """What shows that ranks which step a plain optimizer work on one training."""
        if group.distributed or group.averaged or self._watch.size == 1:
            return None
        return _wrapper(group.parameters) or self._watch.plan.shared

    def look_between(self, group: Group) -> None:
        """What happened to parameters since the last step?"""
        if group.steps < EARLY:
            before, group.versions = group.versions, group.count_writes()
            self._compare_writes(group, group.versions, before)
        if not group.after and group.closely <= 0:
            return
        now = digests(group.parameters)
        if group.after and now != group.after:
            pairs = enumerate(zip(now, group.after, strict=False))
            self._note_written(group, [index for index, (new, old) in pairs if new != old], now)
        group.after = []
        if group.closely > 0:
            group.closely -= 1
            record = {"kind": "again", "key": group.key, "step": group.steps, "parameters": combined(now)}
            self._reporter.send(record | {"left": group.closely})

    def _learn_writes(self, group: Group) -> None:
        """After one of the first steps: how often does the optimizer itself write?"""
        before, group.versions = group.versions, group.count_writes()
        if group.steps > 1:
            own = [new - old for new, old in zip(group.versions, before, strict=False)]
            group.regular &= group.steps == 2 or own == group.own_writes
            group.own_writes = own

    def _compare_writes(self, group: Group, now: Sequence[int], before: Sequence[int]) -> None:
        pairs = enumerate(zip(now, before, strict=False))
        changed = [index for index, (new, old) in pairs if new != old]
        if changed:
            self._note_written(group, changed)

    def _count_writes(self, group: Group) -> None:
        """Later, writes are counted from report to report: the optimizer's own are as many in each step."""
        now, steps = group.count_writes(), group.steps - group.counted
        known = len(group.own_writes) == len(now) == len(group.versions)
        if group.regular and known and group.steps > EARLY:
            pairs = zip(group.versions, group.own_writes, strict=True)
            expected = [old + steps * own for old, own in pairs]
            self._compare_writes(group, now, expected)
        group.versions, group.counted = now, group.steps

    def _note_written(self, group: Group, changed: Sequence[int], now: Sequence[int] = ()) -> None:
        if len(group.written) < 4:
            digest = combined(now) if now else None
            since = group.steps if group.steps < EARLY or now else group.counted
            until = group.steps + 1 if since == group.steps else group.steps
            group.written.append(
                {"step": since, "until": until, "which": list(changed[:5]), "digest": digest}
            )

    def _print(self, group: Group) -> None:
        group.adopt(self._watch.inputs.roots() if group.steps == 1 else ())
        if group.steps >= EARLY:
            self._count_writes(group)
        group.after = digests(group.parameters)
        buffers = group.buffers
        self._reporter.send(
            records.snapshot(
                key=group.key,
                step=group.steps,
                parameters=shortened(group.after),
                gradients=shortened(group.gradients()),
                state=shortened(group.states()),
                rates=group.rates(),
                written=group.written,
                restored=group.restored,
                steered=group.steered,
                buffers=combined(digests(list(buffers.values()))) if buffers else None,
            )
        )
        group.written, group.restored, group.steered = [], [], []

    def _finish(self, group: Group) -> None:
        """The last report of an optimizer; nothing is sent here, as it may be inside a garbage collection."""
        if self._watch.broken or group.steps == 0 or not self._reporter.active:
            return
        buffers = {} if self.for_now else group.buffers
        self._outbox.append(
            records.final(
                key=group.key,
                step=group.steps,
                parameters=shortened(digests(group.parameters)),
                buffers=dict(zip(buffers, digests(list(buffers.values())), strict=True)),
            )
        )

    def _flush(self) -> None:
        while self._outbox:
            self._reporter.send(self._outbox.pop(0))


def _wrapper(parameters: Iterable[torch.Tensor]) -> str | None:
    """The wrapper of torch that averages gradients of these parameters, if there is one anywhere."""
    import gc

    found = sys.modules.get("torch.nn.parallel.distributed")
    kinds = tuple(
        kind for kind in (getattr(found, "DistributedDataParallel", None),) if isinstance(kind, type)
    )
    own = {id(parameter) for parameter in parameters}
    with contextlib.suppress(ReferenceError):  # a proxy of what is gone
        for thing in gc.get_objects():
            if type(thing) in kinds and any(id(parameter) in own for parameter in thing.parameters()):
                return "DistributedDataParallel"
    return None

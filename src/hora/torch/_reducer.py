"""Averages the gradients of one optimizer over the ranks while backward is still running.

A *cycle* averages all buckets once. It opens with the first gradient of a backward, buckets leave in a
fixed order (see :mod:`hora.torch._ready`) as soon as they are complete, and it closes when that backward
ends, inside ``loss.backward()``. Averaging a gradient that is the average already changes nothing, so several
backward passes before one step are right as well. A rank whose backward touched nothing takes part when
it steps. All ranks must make the same number of cycles per step; marks in the messages find out if not.
"""

from __future__ import annotations

import datetime
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.adapter.guard import collective
from hora.core.errors import GradientError, NotInitializedError
from hora.torch import _context
from hora.torch._buckets import Bucket, Named, assign, layout_of
from hora.torch._groups import Groups
from hora.torch._hooks import End, Place, gradient_hook
from hora.torch._marks import Marks, joined_now
from hora.torch._passes import Passes
from hora.torch._ready import Readiness
from hora.torch._rules import Rule
from hora.torch._sums import Sums
from hora.torch._tuning import FIRST, Tuning, note

__all__ = ["Reducer"]


class Reducer:
    """The cycles of one optimizer.

    Args:
        context: of the job whose ranks average.
        named: names and parameters, in order of registration.
        bucket_mb: size of a bucket; None: the first steps find it out, where they can.
        rule: how the gradients are reduced.
        groups: parameters that share a bucket.
        number: of the optimizer, among those that average over all ranks.
    """

    def __init__(
        self,
        context: _context.Context,
        named: Sequence[Named],
        *,
        bucket_mb: float | None,
        rule: Rule,
        groups: Groups | None = None,
        number: int | None = None,
    ) -> None:
        self.packed: Callable[[Bucket], None] | None = None  # the guard looks at this rank's own gradients
        self._context = context
        self._rule = rule
        self._groups = Groups() if groups is None else groups
        self._number = number
        self._set_id = rule.process_set.process_set_id or 0
        self.with_closure = False
        self._passes = Passes(context.turn, wanted=rule.passes, once=rule.once)
        self._named = list(named)
        if bucket_mb is None and (not rule.tunable or self._groups.numbers(self._named)):
            bucket_mb = FIRST
        self._ready = Readiness()
        self._sums = Sums(context, rule.process_set, number)
        self._tuning = Tuning(
            bucket_mb,
            lambda size: layout_of(self._ready.sort(self._named), size),
            functools.partial(self._sums.add_up, "tuning"),
            chosen=functools.partial(note, context),
        )
        self._layouts: dict[tuple[Any, ...], list[Bucket]] = {}
        self._buckets: list[Bucket] = []
        self._places: dict[int, Place] = {}
        self._hooks: dict[int, Any] = {}
        self._lock = threading.RLock()  # backward runs one thread per device
        self._open = False
        self._held = False  # until the order is known, nothing is sent before the end of backward
        self._cycle = 0
        self.task = -1
        self._ends: list[weakref.ref[End]] = []
        self._next = 0
        self._steps = 0
        self._settled = False
        self._joined: float | torch.Tensor = 0  # ranks, told by the first bucket
        self._began = 0.0  # this backward's first gradient
        self._averaged = time.time()
        self._marks = Marks(context)
        self._arrange()
        context.turn.join(self)

    def begin_turn(self, weight: float, *, index: int, count: int) -> None:
        """The loader hands out another batch, or micro-batch."""
        with self._lock:
            if self._passes.turn_to(weight, self._named, index=index, count=count):
                self._settled = False

    def add(self, named: Sequence[Named]) -> None:
        """Take in more parameters."""
        self._abandon()
        self._named += named
        self._layouts.clear()
        self._arrange()

    def remove_hooks(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._ready.stop()

    def before_step(self) -> None:
        """Average, unless a backward of this step did."""
        with self._lock:
            self._abandon()
            self._passes.check_step()
            if not self._settled:
                self._start(task=-1)
                self._finish()
        self._averaged = time.time()

    def after_step(self) -> None:
        self._context.timeline.add("optimizer", self._averaged, time.time())
        self._steps += 1
        self._tuning.after_step()
        self._settled = False
        self._passes.clear()

    def begin_evaluation(self) -> None:
        """A closure is about to compute gradients anew."""
        self._settled = False
        self._passes.clear()

    def mean(self, loss: float) -> float:
        """The mean of a closure's losses over the ranks that have data."""
        self.with_closure = True
        return loss if self._rule.size == 1 else self._sums.mean(loss)

    def before_zero(self) -> None:
        """The gradients are about to be cleared, so what was averaged does not count any more."""
        with self._lock:
            self._abandon()
            self._passes.check_zero()
            self.begin_evaluation()

    def prepare_to_join(self) -> None:
        """Raise GradientError if gradients of this rank would be lost."""
        with self._lock:
            self._abandon()
            if not self._settled:
                self._passes.check_join()

    def answer(self, what: str) -> None:
        """Take part in an operation of the others, without data."""
        kind, *rest = what.split()
        if kind in ("loss", "tuning"):
            self._sums.answer([0.0] * int(rest[1]))
            return
        with self._lock:
            if kind == "order":
                self._agree(joined=True)
                return
            self._tuning.size = float(rest[-1])
            self._arrange()
            found = [bucket for bucket in self._buckets if bucket.label.split()[1:] == rest]
            if not found:
                raise GradientError(
                    "Ranks with data have frozen, thawed or converted parameters since this rank joined.",
                    fix="Call hora.join() on every rank before the parameters of an optimizer change.",
                )
            (self._seat if kind == "seat" else self._answer)(found[0])

    def answer_all(self) -> int:
        """Take part in a whole cycle, without being told of it; how many ranks have joined."""
        with self._lock:
            self._arrange()
            if self._unordered:
                self._context.presence.enter(f"order {self._number}")
                self._agree(joined=True)
            for bucket in self._buckets:
                self._context.presence.enter(bucket.label)
                self._answer(bucket)
            return joined_now(self._buckets[0].marks)

    def restart(self, last: int) -> None:
        """All ranks have the same state again: that of rank ``last``, which took part in everything."""
        with self._lock:
            size = self._tuning.size if self._context.world.rank == last else 0.0
            self._tuning.settle(*self._sums.answer([size]))
            self._marks.clear()
            self._steps = 0
            self.before_zero()

    @property
    def bucket_count(self) -> int:
        self._arrange()
        return len(self._buckets) + self._unordered

    def _answer(self, bucket: Bucket) -> None:
        bucket.pack_nothing(joined=self._rule.process_set.rank())
        patience = self._enter(bucket)
        with self._context.waiting(bucket.place, lasting=self._rule.exchanges):
            sent = self._rule.send(bucket, self._sums.wait, timeout=patience)
            if sent.work is not None:
                self._sums.wait(sent.work, bucket.marks.device)
        self._rule.receive(bucket, sent)
        bucket.discard()

    def _seat(self, bucket: Bucket) -> None:
        with collective(self._context, "make room for gradients", process_set=self._rule.process_set):
            self._rule.seat(bucket, self._sums.wait)

    def _arrange(self) -> None:
        """Choose the buckets for what is trainable now. Ranks freeze parameters alike, so they agree."""
        size = self._tuning.size
        trainable = (size, *((parameter.requires_grad, parameter.dtype) for _, parameter in self._named))
        if self._layouts.get(trainable) is self._buckets and self._buckets:
            return
        if trainable not in self._layouts:
            self._layouts = {key: value for key, value in self._layouts.items() if key[0] == size}
            named = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
            self._layouts[trainable] = assign(
                self._ready.sort(named),
                bucket_mb=size,
                groups=self._groups.numbers(named),
                size=self._rule.size,
            )
            for index, bucket in enumerate(self._layouts[trainable]):
                bucket.label = f"bucket {self._number} {index} {bucket.bytes} {size}"
        self._take(self._layouts[trainable])

    def _take(self, buckets: list[Bucket]) -> None:
        """Let the gradients of the trainable parameters report to these buckets."""
        self._buckets = buckets
        if self._unordered:
            self._ready.watch(self._named)
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                place = self._places.setdefault(id(parameter), Place())
                place.waiting, place.index = bucket.waiting, index
                if id(parameter) not in self._hooks and parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._hooks[id(parameter)] = register(gradient_hook(self, place))

    def _agree(self, *, joined: bool = False) -> None:
        """Agree with the other ranks on the order of the gradients, and put them into buckets by it."""
        add_up = self._sums.answer if joined else functools.partial(self._sums.add_up, "order")
        self._ready.agree(self._named, functools.partial(add_up, name="average gradients"))
        self._layouts.clear()
        self._buckets = []
        self._tuning.renew()
        self._arrange()
        self._held = False

    @property
    def _unordered(self) -> bool:
        return self._rule.ordered and len(self._buckets) > 1 and not self._ready.known

    def advance(self) -> None:
        """Send off the buckets that are complete, as far as the fixed order allows."""
        with self._lock:
            if self._held:
                return
            while self._open and self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._launch(self._buckets[self._next])

    def enter(self, task: int) -> None:
        """A backward gives this cycle its first gradient."""
        with self._lock:
            if task == self.task:
                return
            self._ends = [end for end in self._ends if end() is not None]
            if not self._ends:
                self._abandon()
                if self._passes.begin():
                    self._settled = False
                self._began = time.time()
            if not self._open and self._passes.due:
                self._start(task=task)
            self.task = task
            # Also for a backward inside another (reentrant checkpoints): it closes the cycle when it ends.
            end = End(self, self._cycle)
            self._ends.append(weakref.ref(end))
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _start(self, *, task: int) -> None:
        if _context.current.context is not self._context:
            raise NotInitializedError(
                "This DistributedOptimizer was made before hora.torch.shutdown().",
                fix="Make a new optimizer after the next hora.torch.init().",
            )
        self._marks.check(step=self._steps, wait=False)
        self._arrange()
        for bucket in self._buckets:
            bucket.reset()
        self._open, self.task, self._next, self._held = True, task, 0, self._unordered
        self._cycle += 1
        self._ends = []

    def _launch(self, bucket: Bucket, *, nothing: bool = False) -> None:
        if self._rule.seats(bucket):
            self._context.presence.enter(bucket.label.replace("bucket", "seat", 1), self._set_id)
            self._seat(bucket)
        if nothing:
            bucket.pack_nothing(mark=self._steps % 2)
        else:
            if self._rule.sparse_as_dense:
                bucket.densify()
            weight = self._context.turn.weight
            if not weight:  # this rank has no samples: what it has computed on none does not count
                bucket.clear()
            bucket.pack(size=self._rule.divisor(self._passes.count) / (weight or 1), mark=self._steps % 2)
            if self.packed is not None:
                self.packed(bucket)
        bucket.started = time.time()
        patience = self._enter(bucket)
        if self._rule.size > 1:
            self._context.presence.enter(bucket.label, self._set_id)
        with self._context.waiting(bucket.place, lasting=self._rule.exchanges):
            bucket.work = self._rule.send(bucket, self._sums.wait, timeout=patience)
        if bucket.work.work is not None:
            self._context.pending.add(bucket.work.work)
        self._next += 1
        if not nothing:
            bucket.release()  # behind the message, which is on its way by now

    def _enter(self, bucket: Bucket) -> datetime.timedelta | None:
        """Tell the guard that the bucket leaves; after which time the engine gives it up."""
        guard, process_set = self._context.guard, self._rule.process_set
        if guard is None:
            return None
        if self._rule.size > 1:
            bucket.place = guard.enter_gradients(bucket, process_set)
        return guard.patience(bucket, process_set)

    def end(self, cycle: int) -> None:
        """Called when a backward has made all its gradients."""
        with self._lock:
            within = self._rule.once and sum(end() is not None for end in self._ends) > 1
            if self._open and cycle == self._cycle and not within:
                self._finish()
            self._context.timeline.add("backward", self._began, time.time())

    def _finish(self) -> None:
        if self._held:
            self._agree()
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        late = False
        for bucket in self._wait():
            late |= bucket.unpack()
        self._settled = True
        self._passes.reduced()
        self._marks.check(step=self._steps, wait=self._context.device.type == "cpu")
        if late:  # reentrant checkpoints can make a gradient twice in one backward
            self._start(task=-1)
            self._finish()

    def _abandon(self) -> None:
        """Close a cycle that a failed backward left open. The other ranks still get their messages."""
        if not self._open:
            return
        if self._held:
            self._agree()
        for bucket in self._buckets[self._next :]:
            self._launch(bucket, nothing=True)
        for bucket in self._wait():
            bucket.discard()

    def _wait(self) -> list[Bucket]:
        """Wait for all messages of the cycle and close it."""
        self._open, self.task = False, -1
        # A rank that has come to the last bucket has come to all, so one note for the guard is enough.
        last = self._buckets[-1].place if self._buckets else None
        timeline = self._context.timeline
        with timeline.span("wait for gradients"), self._context.waiting(last, lasting=False):
            for bucket in self._buckets:
                self._wait_for(bucket)
        return self._buckets

    def _wait_for(self, bucket: Bucket) -> None:
        if bucket.work.work is not None:
            self._sums.wait(bucket.work.work, bucket.marks.device)
            self._context.pending.discard(bucket.work.work)
        self._rule.receive(bucket, bucket.work)
        if bucket is self._buckets[0]:
            self._joined = self._marks.read(bucket.marks) if self._rule.size > 1 else 0
        self._rule.finish(bucket, self._joined)
        bucket.work = None  # it would keep the engine alive after shutdown()
        timeline = self._context.timeline
        if timeline.enabled:
            details = {"bytes": bucket.bytes, "tensors": len(bucket.names), "cycle": self._cycle}
            if self._rule.process_set.process_set_id:
                details["process_set"] = self._rule.process_set.process_set_id
            timeline.add("average gradients", bucket.started, time.time(), lane="gradients", details=details)

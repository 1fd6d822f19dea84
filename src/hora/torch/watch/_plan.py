"""What the training is going to do, as far as it shows before the first step; and plans that cannot be."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hora.adapter.frames import user_frames
from hora.core.errors import HoraError, VerdictError
from hora.core.plural import plural

if TYPE_CHECKING:
    from hora.torch._loader import Loader
    from hora.torch.watch._group import Group
    from hora.torch.watch._watch import Watch

__all__ = ["Plan"]


@dataclass(frozen=True)
class _Seen:
    """What a loader of torch's was when it started its last epoch; it may have gone since.

    Attributes:
        steps: batches per epoch; None: nobody knows.
        batch: samples of a batch; None: the loader makes no batches.
        handed: samples per epoch that the sampler hands out on this rank.
        left: which of the data set's samples an epoch repeats or leaves out, in words.
    """

    steps: int | None
    batch: int | None
    handed: int
    left: str

    @classmethod
    def of(cls, loader: Any) -> _Seen:
        sampler, batch = getattr(loader, "sampler", None), loader.batch_size
        samples, handed = _length(getattr(loader, "dataset", None)) or 0, _length(sampler) or 0
        left = ""
        total = getattr(sampler, "total_size", None)
        if isinstance(total, int) and samples and total > samples:
            left = f", {total - samples} samples repeated in each"
        if isinstance(batch, int) and loader.drop_last and handed % batch:
            left += f", {handed % batch * _parts(sampler)} samples dropped in each"
        return cls(_length(loader), batch, handed, left)


class Plan:
    """Gathers the plan from loaders, optimizers and schedules.

    Attributes:
        passes: backward passes per step that an optimizer was told.
        shared: what gives each rank a part of one data set; None: nothing that was seen.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.passes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.shared: str | None = None
        self.batches = 0  # that data loaders have given, up to the first step
        self._left_out = 0  # backward passes of steps that a GradScaler has left out
        self._own: weakref.ref[Loader] | None = None
        self._torch: _Seen | None = None
        self._epochs: int | None = None
        self._warmup: tuple[int, int] | None = None
        self._said = False
        self._rule: str | None = None
        self._elsewhere = False

    def install(self) -> Callable[[], None]:
        """See the steps that a GradScaler leaves out before the first; returns what undoes it."""
        scaler: Any = torch.amp.GradScaler
        original = scaler.update

        @functools.wraps(original)
        def update(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._watch.losses.scaled |= this.is_enabled()
            if not self._watch.step:
                self.batches, self._left_out = 0, self._watch.losses.passes
            return original(this, *args, **kwargs)

        scaler.update = update

        def undo() -> None:
            if scaler.update is update:
                scaler.update = original

        return undo

    # --- what others tell it --------------------------------------------------------------------

    def own_loader(self, loader: Loader) -> None:
        """A loader of Hora's starts an epoch."""
        if self._said:
            return
        self.shared = "hora.data_loader"
        self._own = weakref.ref(loader)
        self._check_window(len(loader))

    def loader(self, loader: Any) -> None:
        """A loader of torch's starts an epoch."""
        if self._watch.loading or self._said:
            return
        sampler = getattr(loader, "sampler", None)
        if _parts(sampler) > 1:
            self.shared = type(sampler).__name__
        self._torch = _Seen.of(loader)
        steps = self._torch.steps
        if steps is None:
            return
        samples = _length(getattr(loader, "dataset", None))
        if steps == 0 and samples:
            batch, size = loader.batch_size, self._watch.size
            self._refuse(
                f"The data loader gives no batch: batch_size={batch}, with drop_last=True, is more than the "
                f"{self._torch.handed} of {samples} {plural(samples, 'sample')} that each of {size} "
                f"{plural(size, 'worker')} gets.",
                fix=f"Write batch_size={max((self._torch.handed or samples) // 2, 1)} or less, or "
                "drop_last=False.",
            )
        self._check_window(steps)

    def elsewhere(self) -> None:
        """Steps are made by an optimizer that is none of torch's: neither plan nor steps show here."""
        self._said = self._elsewhere = True

    def epochs(self, epochs: int) -> None:
        """The training goes through so many epochs."""
        self._epochs = epochs

    def schedule(self, warmup: int, total: int) -> None:
        """A learning rate warms up for so many steps, of so many in all."""
        if self._said or (warmup, total) == self._warmup:
            return
        self._warmup = warmup, total
        if warmup > total > 0:
            self._refuse(
                f"The learning rate warms up for {warmup} steps, but the schedule has {total} in all: it "
                "would never "
                "reach its peak.",
                fix=f"Write warmup={max(total // 10, 1)}, say, or a longer total.",
            )
        self._check_warmup()

    def refuse(self, error: HoraError) -> None:
        """An error that says that the plan cannot be."""
        self._refuse(error.what, fix=error.fix)

    def finish(self) -> None:
        """The job ends: was there ever a step?"""
        losses = self._watch.losses
        steps = None if self._elsewhere else self._steps()
        if self._watch.step == 0 and losses.passes > 1 and steps and losses.passes >= steps:
            self._send(
                f"{losses.passes} backward passes were made, in epochs of {steps}, and no step: a window of "
                "accumulation that is longer than the epoch never comes to its step.",
                "Accumulate over fewer batches than an epoch has, or count them over the epochs.",
                stop=False,
            )

    # --- before the first step ------------------------------------------------------------------

    def before_first_step(self, group: Group, *, broadcast: bool) -> None:
        """Say the plan, once, on rank 0: before the first step of what all ranks train together."""
        own = not (group.distributed or group.averaged or broadcast or self.shared)
        if self._said or (own and self._watch.size > 1):
            return
        self._said = True
        optimizer = group.optimizer
        if optimizer is None:
            return
        found = _schedulers(optimizer)
        for scheduler in found:
            if type(scheduler).__name__ == "LinearLR" and scheduler.start_factor < scheduler.end_factor:
                self._warmup = scheduler.total_iters, 0
        self._check_warmup()
        if self._watch.rank != 0:
            return
        self._rule = type(found[0]).__name__ if found else None
        self._watch.reporter.send({"kind": "plan", "text": self._text(group, optimizer)})
        self._watch.timeline.mark("plan", **self._profile(optimizer))

    def _profile(self, optimizer: Optimizer) -> dict[str, Any]:
        """What ``hora plan --profile`` needs to know of the training besides the time of its steps."""
        trained = [
            parameter
            for entry in optimizer.param_groups
            for parameter in entry["params"]
            if parameter.requires_grad
        ]
        own, other = self._loaders()
        size = self._watch.size
        return {
            "parameters": sum(parameter.numel() for parameter in trained),
            "tensors": len(trained),
            "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained),
            "global_batch": own.global_batch
            if own
            else other.batch * size
            if other and other.batch
            else None,
            "fixed_batch": own is not None,
            "backward_passes": max(self.passes.get(optimizer, 1), 1),
            "threads": torch.get_num_threads(),
            "device": str(trained[0].device.type) if trained else "cpu",
            "gpu": torch.cuda.get_device_name() if trained and trained[0].is_cuda else None,
        }

    def _text(self, group: Group, optimizer: Optimizer) -> str:
        size = self._watch.size
        losses = self._watch.losses
        made = min(losses.since_step, losses.passes - self._left_out)
        passes = max(self.passes.get(optimizer, 1), made, 1)
        said: list[str] = []
        own, other = self._loaders()
        if own is not None:
            shares = math.ceil(self.batches / own.micro_batches)  # micro-batches are loaded one by one
            said.append(_batch(own.global_batch, size, passes, shares))
            dropped = own.samples - own.samples_per_epoch
            steps, samples = len(own), own.samples
            left = (
                f", {dropped} of {samples} samples dropped in each"
                if dropped > 0
                else f", {own.padded} samples repeated in each"
                if own.padded
                else ""
            )
            said.append(f"{steps} {plural(steps, 'batch', many='batches')} per epoch{left}")
        elif other is not None and other.batch is not None:
            said.append(_batch(other.batch * size, size, passes, self.batches))
            if other.steps is not None:
                batches = plural(other.steps, "batch", many="batches")
                said.append(f"{other.steps} {batches} per epoch{other.left}")
        else:
            said.append(f"{size} {plural(size, 'worker')}")
        if self._epochs is not None:
            said.append(f"{self._epochs} {plural(self._epochs, 'epoch')}")
        rates = list(dict.fromkeys(float(entry.get("lr", 0.0)) for entry in optimizer.param_groups))
        rule = self._rule
        if self._warmup is not None:
            rule = f"{f'{rule}, ' if rule else ''}warm-up over {self._warmup[0]} steps"
        said.append(
            f"{type(optimizer).__name__} with learning rate {', '.join(f'{rate:g}' for rate in rates[:3])}"
            + (f" ({rule})" if rule else "")
        )
        return "Plan: " + "; ".join(said) + "."

    # --- plans that cannot be -------------------------------------------------------------------

    def _check_window(self, steps: int) -> None:
        window = max(self.passes.values(), default=1)
        if steps and window > steps:
            self._refuse(
                f"backward_passes_per_step={window}, but an epoch has only {steps} "
                f"{plural(steps, 'batch', many='batches')}: "
                "the window of accumulation is longer than the epoch.",
                fix=f"Write backward_passes_per_step={steps} or less.",
            )

    def _check_warmup(self) -> None:
        steps = self._steps()
        if self._warmup is None or not steps or self._epochs is None:
            return
        window = max(self.passes.values(), default=1)
        run = steps * self._epochs // window
        if self._warmup[0] > run:
            self._refuse(
                f"The learning rate warms up for {self._warmup[0]} steps, but the run has only {run}: "
                f"{self._epochs} {plural(self._epochs, 'epoch')} of {steps // window}.",
                fix=f"Write warmup={max(run // 10, 1)}, say, or train longer.",
            )

    def _loaders(self) -> tuple[Loader | None, _Seen | None]:
        return self._own() if self._own is not None else None, self._torch

    def _steps(self) -> int | None:
        """Batches per epoch."""
        own, other = self._loaders()
        return len(own) if own is not None else other.steps if other is not None else None

    def _refuse(self, what: str, *, fix: str) -> None:
        self._send(what, fix, stop=True)
        raise VerdictError(what, fix=fix, kind="impossible-plan")

    def _send(self, text: str, advice: str, *, stop: bool) -> None:
        frames = user_frames(1)
        where = f"{frames[0][0]}:{frames[0][1]}" if frames else None
        self._watch.reporter.send(
            {"kind": "impossible", "text": text, "advice": advice, "where": where, "stop": stop}
        )


def _batch(together: int, size: int, passes: int, batches: int) -> str:
    micro = together // size
    split = 0 < batches < passes  # one batch of the loader is cut up for several backward passes
    per_step = together * (batches if split else passes)
    times = f" x {batches} batches" if split and batches > 1 else ""
    if split:
        times += f" in {passes} backward passes"
    elif passes > 1:
        times = f" x {passes} backward passes"
    return f"global batch {per_step} ({size} {plural(size, 'worker')} x {micro} samples{times})"


def _parts(sampler: Any) -> int:
    """Among how many ranks a sampler of torch's shares the samples out."""
    total, own = getattr(sampler, "total_size", None), getattr(sampler, "num_samples", None)
    return total // own if isinstance(total, int) and isinstance(own, int) and own else 1


def _length(thing: Any) -> int | None:
    if not isinstance(thing, Sized):
        return None
    try:
        return len(thing)
    except TypeError:  # a loader over an iterable data set
        return None


def _schedulers(optimizer: Optimizer) -> list[Any]:
    """The schedules that steer an optimizer."""
    if "initial_lr" not in optimizer.param_groups[0]:
        return []
    import gc

    kind: Any = sys.modules["torch.optim.lr_scheduler"].LRScheduler
    owners: dict[int, Any] = {}
    for thing in gc.get_referrers(optimizer):
        for owner in [thing, *gc.get_referrers(thing)] if type(thing) is dict else [thing]:
            if isinstance(owner, kind) and getattr(owner, "optimizer", None) is optimizer:
                owners[id(owner)] = owner
    return list(owners.values())

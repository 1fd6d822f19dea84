"""Looks at each rank's own gradients: are they finite, and does every trainable parameter get one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from hora.adapter.frames import user_frame
from hora.guard.reporter import Reporter
from hora.torch.shard._gradient import GradientShare
from hora.torch.watch._digest import digests

if TYPE_CHECKING:
    from hora.torch._buckets import Bucket
    from hora.torch._guard import Guard
    from hora.torch.watch._group import Group
    from hora.torch.watch._watch import Watch

__all__ = ["EARLY", "Losses", "Pass", "is_skipped", "look_for_idle", "note_bucket", "note_plain", "take_bad"]

EARLY = 8
"""Steps in which a parameter must have got a gradient once, on any rank, and have changed."""

BY_TURNS = 100
"""The same for the gradient in a model that uses its parts by turns."""

SMALL = 16384
"""Elements up to which gradients are copied together: one pass over many beats many calls."""

_CPU = torch.device("cpu")

NOTICEABLE = 4.0
"""A change of so many units in the last place must show in a parameter."""


class Pass(NamedTuple):
    """A backward pass.

    Attributes:
        number: how many there have been with it.
        code: the user's that called it; None: nobody's.
        line: of that code's file.
    """

    number: int
    code: CodeType | None
    line: int

    @property
    def where(self) -> str | None:
        """``file:line``."""
        return f"{self.code.co_filename}:{self.line}" if self.code is not None else None


class Losses:
    """The losses that backward passes start from.

    Attributes:
        last: the backward pass that began last.
        stepped: how many there had been at the last step.
        scaled: whether a GradScaler multiplies them, which may overflow where their gradients do not.

    Args:
        guard: learns where the script calls them.
    """

    def __init__(self, guard: Guard) -> None:
        self.last = Pass(0, None, 0)
        self.stepped = 0
        self.scaled = False
        self._guard = guard
        self._value: float | torch.Tensor | None = None

    @property
    def passes(self) -> int:
        """Backward passes so far."""
        return self.last.number

    @property
    def since_step(self) -> int:
        """Backward passes since the last step of any optimizer."""
        return self.passes - self.stepped

    @property
    def is_fine(self) -> bool:
        """Whether the last loss is known to be finite."""
        value = self._value
        return isinstance(value, float) and value - value == 0.0

    def install(self) -> Callable[[], None]:
        """See each backward pass, until the returned function is called."""
        original: Any = torch.autograd.backward
        guard = self._guard

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if type(tensors) is torch.Tensor and tensors.is_cpu and tensors.numel() == 1:
                self._value = tensors.item()
            elif isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._value = tensors.detach()
            else:
                self._value = None
            outer = guard.site
            frame, number = user_frame(2), self.last.number + 1
            if frame is None:
                self.last, guard.site = Pass(number, None, 0), None
            else:
                code = frame.f_code
                self.last = Pass(number, code, frame.f_lineno)
                guard.site = code.co_filename, code.co_firstlineno, frame.f_lasti
            try:
                original(tensors, *args, **kwargs)
            finally:
                guard.site = outer

        torch.autograd.backward = backward

        def undo() -> None:
            self._value = None
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        return undo

    def fault(self, *, wait: bool = True) -> str | None:
        """What is wrong with the last loss; None: nothing, or nobody knows without waiting for a GPU."""
        value = self._value
        if isinstance(value, torch.Tensor):
            if not (wait or value.device == _CPU):
                return None
            value = value.item()
        return _fault(value) if isinstance(value, float) and value - value != 0.0 else None


def note_bucket(watch: Watch, group: Group, bucket: Bucket) -> None:
    """This rank's own gradients in a bucket, before they are summed over the ranks."""
    payload = bucket.payload
    if not payload.is_cpu:
        maxima = _maxima(bucket.gradients())
        group.local.append(maxima)
        group.pending[id(bucket)] = (bucket.names, maxima, watch.losses.last)
        return
    # The buffer was written just now, so that most of it is still in a cache.
    total = payload.sum().item() if payload.dtype is torch.float32 else _total(payload)
    group.local.append(total)
    if total - total == 0.0:
        if group.bad:
            group.bad.pop(id(bucket), None)  # that of a step which a GradScaler has left out
        return
    found = _scan(zip(bucket.names, bucket.gradients(), strict=True))
    if found is None:
        group.bad.pop(id(bucket), None)
    elif id(bucket) not in group.bad:
        group.bad[id(bucket)] = found | _of(watch.losses)


def note_plain(group: Group, losses: Losses) -> None:
    """The gradients that a plain optimizer is about to use."""
    present = [
        (index, parameter.grad)
        for index, parameter in enumerate(group.parameters)
        if parameter.grad is not None
    ]
    if not present:
        return
    gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for _, gradient in present]
    if gradients[0].device.type != "cpu":
        maxima = _maxima(gradients)
        names = group.names
        group.pending[0] = ([names[index] for index, _ in present], maxima, losses.last)
        return
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    totals: list[float] = []
    with torch.no_grad():
        for gradient in gradients:
            if gradient.numel() <= SMALL:
                small.setdefault(gradient.dtype, []).append(gradient)
            else:
                totals.append(_total(gradient))
        totals += [_total(torch._C._nn.flatten_dense_tensors(together)) for together in small.values()]
    group.bad.pop(0, None)
    if not all(map(math.isfinite, totals)):
        names = group.names
        pairs = zip((names[index] for index, _ in present), gradients, strict=True)
        found = _scan(pairs)
        if found:
            group.bad[0] = found | _of(losses)


def _of(losses: Losses, *, fault: str | None = None) -> dict[str, Any]:
    """What belongs to the last backward pass in a report: its loss, its order and its line."""
    last = losses.last
    return {"loss": fault or losses.fault(), "order": last.number, "where": last.where}


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether the step was not taken: a fused optimizer itself leaves it if the scaler found infinities."""
    found = optimizer.__dict__.get("found_inf")
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found)


def take_bad(group: Group, losses: Losses) -> dict[str, Any] | None:
    """What was not finite in the gradients that a step has used; None: all was well.

    On a GPU nothing waits: what is asked for in one step is known some steps later.
    """
    if group.pending:
        optimizer = group.optimizer
        skipped = getattr(optimizer, "found_inf", None)
        together = torch.cat([maxima.float() for _, maxima, _ in group.pending.values()])
        if isinstance(skipped, torch.Tensor):
            together = torch.where(skipped.to(together.device) > 0, 0.0, together)
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.Event(device=together.device)
        event.record()
        names = [name for names, _, _ in group.pending.values() for name in names]
        last = max((last for _, _, last in group.pending.values()), key=lambda last: last.number)
        group.away.append((event, host, names, group.steps, last))
        group.pending.clear()
    while group.away and group.away[0][0].query():
        _, host, names, step, last = group.away.popleft()
        if not bool(torch.isfinite(host).all()):
            found = [(name, value) for name, value in zip(names, host.tolist(), strict=True)]
            wrong = [(name, value) for name, value in found if not math.isfinite(value)]
            return {
                "names": [name for name, _ in wrong[:5]],
                "count": len(wrong),
                "value": _fault(wrong[0][1]),
                "loss": None,
                "order": last.number,
                "where": last.where,
                "step": step,
            }
    if not group.bad:
        fault = None if losses.scaled else losses.fault(wait=False)
        if fault is None:
            return None
        return {"names": [], "count": 0, "value": fault} | _of(losses, fault=fault)
    first = min(group.bad.values(), key=lambda bad: int(bad["order"]))
    group.bad.clear()
    return first


def look_for_idle(group: Group, reporter: Reporter, *, last: bool = False) -> None:
    """After an optimizer's first steps, and at the end of a shorter run: what did not move?"""
    if group.done or group.looked or group.steps == 0:
        return
    parameters = group.parameters
    trainable = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
    if not last:
        if group.steps > EARLY:
            trainable = [index for index in trainable if index in group.silent]
        silent = {index for index in trainable if _is_silent(parameters[index].grad, group)}
        if group.steps <= EARLY:
            group.branches |= group.steps > 1 and silent != group.quiet
            group.quiet = silent
            stuck = _stuck(group, [index for index in trainable if index not in silent])
            group.stuck = stuck if group.steps == 1 else group.stuck & stuck
        group.silent = silent if group.steps == 1 else group.silent & silent
        everything = group.steps == 1 and trainable and len(group.silent) == len(trainable)
        waits = group.steps < EARLY or (group.branches and group.silent and group.steps < BY_TURNS)
        if waits and not everything:
            return
    group.looked = True
    names = group.names
    reporter.send(
        {
            "kind": "idle",
            "key": group.key,
            "members": group.members,
            "optimizer": type(group.optimizer).__name__ if group.optimizer is not None else "",
            "where": group.where,
            "step": group.steps,
            "trainable": sum(parameter.requires_grad for parameter in parameters),
            "silent": sorted(group.silent),
            "stuck": sorted(group.stuck),
            "names": {str(index): names[index] for index in sorted(group.silent | group.stuck)[:200]},
        }
    )


def _is_silent(gradient: torch.Tensor | None, group: Group) -> bool:
    if gradient is None:
        return True
    # The form for Horovod scripts gives every parameter zeros, as Horovod does.
    return group.averaged and not bool(gradient.any())


def _stuck(group: Group, candidates: Sequence[int]) -> set[int]:
    """Parameters that have not changed since the start, though their gradient should have moved them."""
    if not group.start or not candidates:
        return set()
    parameters = group.parameters
    now = digests([parameters[index] for index in candidates])
    same = [
        index
        for index, number in zip(candidates, now, strict=True)
        if index < len(group.start) and number == group.start[index]
    ]
    if not same:
        return set()
    rates = group.learning_rates()
    return {index for index in same if _should_move(parameters[index], rates[index])}


def _should_move(parameter: torch.Tensor, rate: float) -> bool:
    gradient = parameter.grad
    if gradient is None or rate <= 0 or not parameter.numel() or not parameter.is_floating_point():
        return False
    if isinstance(gradient, GradientShare):
        gradient = gradient.part
        if not gradient.numel():
            return True  # the ranks that have a part of it can tell
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    with torch.no_grad():
        move = rate * float(gradient.abs().max()) if gradient.numel() else 0.0
        return move > NOTICEABLE * torch.finfo(parameter.dtype).eps * float(parameter.abs().max())


def _total(tensor: torch.Tensor) -> float:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return float(tensor.sum(dtype=torch.float32))
    return float(tensor.sum())


def _maxima(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return torch.stack(list(torch._foreach_norm(real, math.inf)))


def _scan(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any] | None:
    """The parameters whose gradient is not finite; None if there are none: the sum alone was too large."""
    wrong = [(name, gradient) for name, gradient in named if not bool(torch.isfinite(gradient).all())]
    if not wrong:
        return None
    return {
        "names": [name for name, _ in wrong[:5]],
        "count": len(wrong),
        "value": "nan" if bool(torch.isnan(wrong[0][1]).any()) else "inf",
    }


def _fault(value: float) -> str | None:
    return "nan" if math.isnan(value) else "inf" if math.isinf(value) else None

"""What experiments of ``hora verify`` change around a step: gradients, learning rate, first parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hora.torch.shard._gradient import whole
from hora.torch.verify._intervene import group

if TYPE_CHECKING:
    from hora.torch.verify._record import Recorder

_all_reduce = dist.all_reduce  # before the recorder looks on

__all__ = ["StepInterventions"]


class StepInterventions:
    """Those of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._plan = recorder.plan
        self._apply = frozenset(recorder.plan.apply)
        self._own_rates: list[Any] = []
        self._modules = 0

    def first_call(self, module: torch.nn.Module) -> None:
        """Start from the first parameters of the run with one worker ("initial-parameters")."""
        if "initial-parameters" not in self._apply or self._plan.initial is None:
            return
        path = self._plan.initial.with_name(f"{self._plan.initial.name}-{self._modules}")
        self._modules += 1
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if self._recorder.size == 1:
            # Not torch.save, which is left out in such a run.
            torch.serialization.save({name: value.detach().cpu() for name, value in state.items()}, path)
            return
        first = torch.load(path)
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(first[name])

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, as if it had been divided by the number of passes that the step really has ("tail")."""
        if "tail" not in self._apply or self._recorder.steps >= len(self._plan.windows):
            return loss
        factor = self._plan.windows[self._recorder.steps]
        return loss if factor == 1.0 else loss * factor

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Set the learning rate, and the gradients unless the step computes them itself."""
        self._own_rates = [group_.get("lr") for group_ in optimizer.param_groups]
        rates = self._plan.rates
        for place, group_ in enumerate(optimizer.param_groups):
            if "lr" not in group_:
                continue
            rate = float(group_["lr"]) * self._plan.factor
            if "learning-rate" in self._apply and self._recorder.steps < len(rates):
                rate = rates[self._recorder.steps][place]
            _set_rate(group_, rate)
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self._after(kwargs["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._after(args[1], optimizer), *args[2:]), kwargs
        self._change_gradients(optimizer)
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Give the script its learning rate back, which its schedule goes on from."""
        for group_, rate in zip(optimizer.param_groups, self._own_rates, strict=False):
            if rate is not None and self._touches_rate:
                _set_rate(group_, rate)

    @property
    def _touches_rate(self) -> bool:
        return self._plan.factor != 1.0 or "learning-rate" in self._apply

    def _after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        @functools.wraps(closure)
        def changed() -> Any:
            loss = closure()
            with torch._C.DisableTorchFunction():
                self._change_gradients(optimizer)
            return loss

        return changed

    @torch.no_grad()
    def _change_gradients(self, optimizer: Optimizer) -> None:
        size = self._recorder.size
        parameters = [value for group_ in optimizer.param_groups for value in group_["params"]]
        if "unclipped" in self._apply:
            for value in parameters:
                raw = self._recorder.raw.get(id(value))
                value.grad = None if raw is None else raw.clone()
        if size == 1:
            return
        if self._apply & {"averaging", "unclipped"}:
            for value in parameters:
                if value.requires_grad:
                    _average(value, size)
        factor = 1 / size if "summed" in self._apply else size if "once-averaged" in self._apply else 1
        if factor != 1:
            for value in parameters:
                if value.grad is not None:
                    value.grad.mul_(factor)


def _average(parameter: torch.Tensor, size: int) -> None:
    """The mean over the ranks; a gradient that only other ranks have counts as zero here."""
    wire = torch.zeros(parameter.numel() + 1, dtype=torch.float64)
    if parameter.grad is not None:
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else whole(parameter.grad)
        wire[:-1] = gradient.detach().reshape(-1).double().cpu()
        wire[-1] = 1
    _all_reduce(wire, group=group())
    if wire[-1]:
        mean = (wire[:-1] / size).to(parameter.device, parameter.dtype).view_as(parameter)
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = mean
        else:
            parameter.grad.copy_(mean)


def _set_rate(group_: dict[str, Any], rate: Any) -> None:
    if isinstance(group_["lr"], torch.Tensor):
        group_["lr"].fill_(float(rate))
    else:
        group_["lr"] = rate

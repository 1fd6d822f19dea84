"""Finds out whether an optimizer may be sharded: does its step treat each element by itself?

It is tried. A small tensor is stepped as a whole, and its two halves by themselves; the results must be the
same. That also holds for optimizers that torch does not have, and nobody has to keep a list. An optimizer
that asks for norms of whole tensors (:mod:`hora.torch._layerwise`) is answered those of the whole for the
halves too, as the ranks are.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hora.core.errors import GradientError
from hora.torch._layerwise import Columns, Layerwise, Norms, sums_of_squares
from hora.torch.shard._inner import raw_step, stand_in

__all__ = ["scalar_keys"]

SHAPE = (3, 4)
CUT = 5
STEPS = 3
RATE = 0.125
"""A learning rate with which a step shows, also where the optimizer's own is 0 while it warms up."""

TOLERANCE = 1e-9
"""In float64, for sums in another order. Optimizers with norms of tensors differ in the first digits."""


def scalar_keys(optimizer: Optimizer) -> set[str]:
    """The entries of the state that are one number for a whole tensor, such as a count of steps.

    Raises:
        GradientError: a step that needs whole tensors.
    """
    _check_attributes(optimizer)
    found: set[str] = set()
    tried: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        kind = _kind(group)
        if group["params"] and kind not in tried:
            tried.add(kind)
            found |= _Trial(optimizer, number).scalars()
    return found


_Answer = Callable[[list[torch.Tensor], Columns], Norms]


def _telling(told: list[Norms]) -> _Answer:
    """Answers with norms, and keeps the answers."""

    def answer(parameters: list[torch.Tensor], columns: Columns) -> Norms:
        told.append([squares.sqrt() for squares in sums_of_squares(columns)])
        return told[-1]

    return answer


def _repeating(told: Sequence[Norms]) -> _Answer:
    """Gives the same answers again."""
    answers = iter(told)
    return lambda parameters, columns: next(answers)


NUMBERS = ("step", "eta", "mu", "mu_product")
"""Entries that are one number for a tensor, if all tensors are numbers themselves."""


class _Trial:
    """Steps of one parameter group's kind on a small tensor."""

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self._optimizer = optimizer
        self._plain = type(optimizer)
        self._number = number
        group = optimizer.param_groups[number]
        model = group["params"][0]
        self._device = model.device
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        self._dtype = torch.complex128 if model.is_complex() else wide

    def scalars(self) -> set[str]:
        values = self._numbers(7)
        gradients = [self._numbers(11 + step) * (1 + 20 * (step == 1)) for step in range(STEPS)]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            told: list[Norms] = []
            whole, state = self._run(
                values.view(SHAPE), [each.view(SHAPE) for each in gradients], norms=_telling(told)
            )
            halves = [
                self._run(values[part], [each[part] for each in gradients], norms=_repeating(told))
                for part in (slice(0, CUT), slice(CUT, None))
            ]
        self._compare("the parameter", whole, [parameter for parameter, _ in halves])
        found = set()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == SHAPE:
                self._compare(f"its state {key!r}", value, [half[key] for _, half in halves])
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                found.add(key)
            elif isinstance(value, torch.Tensor | list | tuple | dict):
                raise self._refusal(f"its state {key!r} is not one number, or one number for each element")
        return found

    def _run(
        self, values: torch.Tensor, gradients: Sequence[torch.Tensor], *, norms: _Answer
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = torch.nn.Parameter(values.clone())
        own: list[list[torch.Tensor]] = [[] for _ in self._optimizer.param_groups]
        own[self._number] = [parameter]
        state: Any = collections.defaultdict(dict)
        first = self._first_state(values)
        if first:
            state[parameter] = first
        trial = stand_in(self._optimizer, self._plain, own, state)
        if issubclass(self._plain, Layerwise):
            trial._hora_norms = norms
        group = trial.param_groups[self._number]
        trial.param_groups = [group]
        rate = group.get("lr")
        group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE
        step = raw_step(self._plain)
        try:
            for gradient in gradients:
                parameter.grad = gradient.clone()
                step(trial)
        except Exception as error:
            raise self._refusal(f"on a part of one it raises {type(error).__name__}: {error}") from error
        return parameter.detach(), dict(state.get(parameter, {}))

    def _first_state(self, values: torch.Tensor) -> dict[str, Any]:
        """A state to begin with, of optimizers that have one before their first step."""
        state = self._optimizer.state
        models = [each for each in self._optimizer.param_groups[self._number]["params"] if state.get(each)]
        if not models:
            return {}
        model = max(models, key=lambda each: (each.numel(), each.dim()))
        made = {}
        for key, value in state[model].items():
            if not isinstance(value, torch.Tensor):
                made[key] = value
            elif value.shape == model.shape and not (value.dim() == 0 and key in NUMBERS):
                made[key] = torch.ones_like(values) * value.reshape(-1)[0].to(self._dtype)
            elif value.numel() == 1:
                made[key] = value.clone()
            else:
                raise self._refusal(
                    f"its state {key!r} has the shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(model.shape)}"
                )
        return made

    def _numbers(self, seed: int) -> torch.Tensor:
        steps = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64)
        numbers = torch.sin(steps * seed + seed) + 0.1 * torch.cos(3 * steps)
        if self._dtype.is_complex:
            numbers = torch.complex(numbers, torch.cos(steps + seed))
        return numbers.to(self._device, self._dtype)

    def _compare(self, what: str, whole: torch.Tensor, halves: Sequence[torch.Tensor]) -> None:
        joined = torch.cat([half.reshape(-1) for half in halves])
        row = whole.reshape(-1)
        if joined.shape != row.shape or not torch.allclose(
            joined, row, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        ):
            raise self._refusal(f"{what} comes out different when its two halves are stepped by themselves")

    def _refusal(self, why: str) -> GradientError:
        name = self._plain.__name__
        return GradientError(
            f"{name} does not go with shard='optimizer', where each rank steps parts of the tensors: {why}.",
            fix=f"Leave out shard for {name}, or take an optimizer that treats each element by itself, such "
            "as torch.optim.AdamW.",
        )


def _check_attributes(optimizer: Optimizer) -> None:
    """Refuse optimizers that reach their parameters on another way than by their groups."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in vars(optimizer).items():
        if key in ("param_groups", "state"):
            continue
        if isinstance(value, Optimizer) or any(id(item) in own for item in _items(value)):
            name = type(optimizer).__name__
            raise GradientError(
                f"{name} does not go with shard='optimizer', where each rank steps parts of the tensors: "
                f"its attribute {key!r} holds the whole parameters.",
                fix=f"Leave out shard for {name}, or take an optimizer that treats each element by itself, "
                "such as torch.optim.AdamW.",
            )


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()


def _kind(group: dict[str, Any]) -> str:
    """Groups of one kind need one trial: numbers matter only by whether they are 0."""
    return repr(
        sorted(
            (key, value != 0 if isinstance(value, float) else str(value))
            for key, value in group.items()
            if key not in ("params", "lr", "initial_lr", "param_names")
        )
    )

"""What each part of the guard costs per step, by clocks around it: ``guard_cost.py --parts``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import dataloader as loaders

if TYPE_CHECKING:
    from guard_cost import Switch, Training

clock = time.perf_counter_ns  # that of the thread takes longer to read than most parts take


class Meter:
    """Time that each part takes itself, without parts and other functions inside it."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = [Counter()]
        self._stack: list[list[int]] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to that of the part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._stack.append([clock(), 0])
            try:
                return function(*args, **kwargs)
            finally:
                self._end(part)

        return call

    def block(self, part: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes context managers, with the time of their beginning and end."""
        meter = self

        class Block:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                block = meter.timed(part, make)(*args, **kwargs)
                self._enter, self._exit = (
                    meter.timed(part, block.__enter__),
                    meter.timed(part, block.__exit__),
                )

            def __enter__(self) -> Any:
                return self._enter()

            def __exit__(self, *args: object) -> Any:
                return self._exit(*args)

        return Block

    def _end(self, part: str) -> None:
        started, inside = self._stack.pop()
        taken = clock() - started
        if self._stack:
            self._stack[-1][1] += taken
        self.steps[-1][part] += taken - inside


def parts(
    training: Training, switch: Switch, *, steps: int, blocks: int, whole: str
) -> dict[str, list[float]]:
    """Seconds per step that the whole step and each part take on this rank, a value per block of steps.

    A part that is not in every step, such as a fingerprint, counts with its mean. Of each block the tenth of
    the steps is left out in which something else came in between.
    """
    meter = Meter()
    _install(meter, switch)
    nothing = meter.timed("(nothing: the clock itself)", lambda: None)
    meter.steps.clear()
    taken = []
    for _ in range(steps):
        meter.steps.append(Counter())
        start = clock()
        loss = training.forward()
        nothing()
        training.learn(loss)
        taken.append(clock() - start)
    for counted, time_of_step in zip(meter.steps, taken, strict=True):
        counted[whole] = time_of_step
    names = sorted({name for counted in meter.steps for name in counted if not name.startswith("-")})
    found: dict[str, list[float]] = {name: [] for name in [whole, *names]}
    for block in numpy.array_split(numpy.arange(steps), blocks):
        for name in names:
            times = numpy.sort([meter.steps[step][name] for step in block if name in meter.steps[step]])
            kept = times[: -(-len(times) * 9 // 10)]
            mean = float(kept.mean()) if len(kept) else 0.0
            found[name].append(mean * len(times) / len(block) / 1e9)
    return found


def _install(meter: Meter, switch: Switch) -> None:
    guard, watch, reducer = switch.guard, switch.watch, switch.reducer
    autograd, iterator, prints = _module(torch.autograd), _module(loaders)._BaseDataLoaderIter, watch.prints
    _inside(autograd.backward, lambda original: meter.timed("-", original))
    autograd.backward = meter.timed("backward: the loss, and the line", autograd.backward)
    _inside(iterator.__next__, lambda all_: all_ | {"__next__": meter.timed("-", all_["__next__"])})
    _inside(iterator._next_index, lambda all_: all_ | {"_next_index": meter.timed("-", all_["_next_index"])})
    for name in ("__next__", "_next_index"):
        setattr(iterator, name, meter.timed("data loader", getattr(iterator, name)))
    reducer.packed = meter.timed("bucket: are its gradients finite", reducer.packed)
    _replace(guard, "enter_gradients", lambda f: meter.timed("bucket: entry on the board", f))
    _replace(guard, "waiting", lambda f: meter.block("waits: phases on the board", f))
    _replace(prints, "_print", lambda f: meter.timed("fingerprint", f))
    _replace(prints, "look_between", lambda f: meter.timed("fingerprint, before the next step", f))
    for (hooks, _), name in zip(switch.hooks, ("_before_step", "_after_step"), strict=True):
        # As deep in the stack as the hook itself, which looks at its caller.
        hook = getattr(type(watch), name).__wrapped__.__get__(watch)
        part = f"optimizer: {name[1:].replace('_', ' ')}"
        for key in hooks:
            hooks[key] = meter.timed(part, hook)


def _module(module: Any) -> Any:
    return module


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _inside(stand_in: Any, change: Callable[[Any], Any]) -> None:
    """Change the original that a stand-in calls."""
    for name, cell in zip(stand_in.__code__.co_freevars, stand_in.__closure__, strict=True):
        if name in ("original", "originals"):
            cell.cell_contents = change(cell.cell_contents)

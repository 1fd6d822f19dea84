"""What each part of the guard costs per step, by clocks around it: ``guard_cost.py --parts``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import dataloader as loaders

import hora.torch as hora

if TYPE_CHECKING:
    from guard_cost import Switch, Training

clock = time.perf_counter_ns  # that of the thread takes longer to read than most parts take


class Meter:
    """Time that each part takes itself, without parts and other functions inside it."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = [Counter()]
        self.calls: Counter[str] = Counter()
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
        self.calls[part] += 1


def show_parts(model: str, training: Training, switch: Switch, *, steps: int, mark: str) -> None:
    """Print the parts, of rank 0."""
    meter = Meter()
    _install(meter, switch)
    nothing = meter.timed("(nothing: the clock itself)", lambda: None)
    meter.calls.clear()
    meter.steps.clear()
    whole = []
    for _ in range(steps):
        meter.steps.append(Counter())
        start = clock()
        loss = training.forward()
        nothing()
        training.learn(loss)
        whole.append(clock() - start)
    if hora.rank() != 0:
        return
    step = float(numpy.median(whole)) / 1e3
    print(f"{mark}{model}: {step:.0f} us per step; the first row is what the clock adds to a call")
    total = 0.0
    for part in sorted(meter.calls):
        if part.startswith("-"):
            continue
        # The mean of what happens in each step, without the tenth in which something else came in between.
        times = numpy.sort([counted[part] for counted in meter.steps if part in counted]) / 1e3
        mean = float(times[: -(-len(times) * 9 // 10)].mean()) * len(times) / steps
        total += 0.0 if part.startswith("(") else mean
        calls = meter.calls[part] / steps
        print(f"{mark}  {part:44}{calls:7.2f} calls{mean:9.1f} us{100 * mean / step:8.2f} %")
    print(f"{mark}  {'together':44}{'':13}{total:9.1f} us{100 * total / step:8.2f} %", flush=True)


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

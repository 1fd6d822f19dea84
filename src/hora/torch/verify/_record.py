"""Writes down, step by step, what a training on this rank did; ``hora verify`` compares such records.

The script is not changed: the recorder looks on through hooks of PyTorch. ``_record_sources`` follows the
batches, ``_intervene`` looks into single operations and changes them where an experiment wants that.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hora.adapter.recording.recorder import recorder
from hora.core.recording import Batch, Ending, Plan, Step, as_line, rounding
from hora.torch import _context
from hora.torch.shard._gradient import whole
from hora.torch.verify._intervene import Watch
from hora.torch.verify._intervene_steps import StepInterventions
from hora.torch.verify._record_metrics import Metrics
from hora.torch.verify._record_prints import fingerprint, first_tensor, row_digests
from hora.torch.verify._record_sources import Sources

__all__ = ["Recorder"]


class Recorder:
    """The record of this rank.

    Attributes:
        plan: what is to be recorded and changed.
        rank: of this worker.
        size: of the job.
        steps: steps that have ended.
        passes: backward passes since the last step.
        depth: how many modules are being called inside each other.
        root: the outermost modules that have parameters.
    """

    def __init__(self, plan: Plan, *, rank: int, size: int) -> None:
        self.plan, self.rank, self.size = plan, rank, size
        self.steps = self.passes = self.depth = 0
        self.roots: list[torch.nn.Module] = []
        self.watch = Watch(self)
        self.sources = Sources(self)
        self.metrics = Metrics(self)
        self.changes = StepInterventions(self)
        self.uses: set[str] = set()
        self.raw: dict[int, torch.Tensor] = {}
        self._pid = os.getpid()
        self._file: TextIO | None = None
        self._batches: list[Batch] = []
        self._rows: list[str] = []
        self._random = b""
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}
        self._watched: set[int] = set()
        self._dtypes: set[str] = set()
        self._before: dict[str, list[float]] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._where = ""
        self._unsaved = 0
        self._ended = self._stopping = self._backwards = False

    @property
    def active(self) -> bool:
        """False in processes that the rank has forked, such as its loaders, and in scripts that only use
        PyTorch beside another framework.
        """
        return os.getpid() == self._pid and recorder().in_charge("hora.torch")

    def start(self) -> None:
        """Put all hooks in place; called once, before the script."""
        self._file = self.plan.lines(self.rank).open("w", encoding="utf-8", buffering=1)
        # What a script leaves to chance would differ from run to run; between ranks it still differs.
        random.seed(self.rank)
        np.random.seed(self.rank)
        torch.manual_seed(self.rank)
        if self.plan.float64:
            torch.set_default_dtype(torch.float64)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        _replace(torch.autograd, "backward", self._backward)
        _replace(torch.nn.Module, "__call__", self._call)
        _replace(torch, "save", self._save)
        self.sources.start()
        self.metrics.start()
        self.watch.start()
        atexit.register(self._finish, "finished")

    # --- the modules ----------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            outermost = self.depth == 0 and self.active
            # Autograd calls checkpointed modules again, and takes modes out of force meanwhile.
            again = outermost and self._backwards and torch._C._len_torch_function_stack() == 0
            if outermost and not self._backwards and any(True for _ in module.parameters()):
                args, kwargs = self._enter(module, args, kwargs)
            self.depth += 1
            try:
                with self.watch if again else contextlib.nullcontext():
                    return original(module, *args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An outermost module is called."""
        with torch._C.DisableTorchFunction():
            if self.plan.float64:
                args, kwargs = self.watch.widen(module, args, kwargs)
            given = first_tensor((args, kwargs))
            rows = len(given) if given is not None else 0
            if not torch.is_grad_enabled():
                self.metrics.saw(self.sources.rows(rows))
                self.sources.forget()
                return args, kwargs
            if not any(module is root for root in self.roots):
                self.roots.append(module)
                self.changes.first_call(module)
                self._follow(module)
            self.metrics.called(rows)
            self._rows = row_digests(given) if given is not None else []
        return args, kwargs

    def _follow(self, module: torch.nn.Module) -> None:
        """Keep what this rank's own backward passes add to each gradient."""
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                register: Any = parameter.register_hook
                register(_adder(self.raw, id(parameter)))

    # --- backward -------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            # Checkpoints make backward passes inside of others.
            if self._backwards or not self.active or not isinstance(loss, torch.Tensor):
                return original(tensors, *args, **kwargs)
            if _context.current.context is None:
                self.stop("no-init")
            if self.steps >= self.plan.steps:
                self.stop("stopped")
            with torch._C.DisableTorchFunction():
                self._note_pass(loss)
            self._backwards = True
            try:
                changed = self.changes.scaled(loss) if loss is tensors else tensors
                return original(changed, *args, **kwargs)
            finally:
                self._backwards = False
                self.passes += 1
                self.watch.new_pass()
                self._random = self._random_state()

        return backward

    def _note_pass(self, loss: torch.Tensor) -> None:
        if self._random and self._random_state() != self._random:
            self.uses.add("random numbers")
        given = self.sources.given(self._rows)
        self.sources.trained()
        self._batches.append(
            Batch(
                samples=given.samples,
                source=given.source,
                content=given.content,
                rows=len(given.samples),
                loss=float(loss.detach().double().sum()),
                counts=list(self.watch.counts),
            )
        )
        self.metrics.trained(len(given.samples))
        self._rows = []

    def mark_random(self) -> None:
        """The batch is there: what is drawn from now on is not the loader's."""
        self._random = self._random_state()

    def _random_state(self) -> bytes:
        digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
        digest.update(repr(random.getstate()[1]).encode())
        of_numpy: Any = np.random.get_state()
        digest.update(of_numpy[1].tobytes() + repr(of_numpy[2:]).encode())
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            digest.update(cuda.get_rng_state().numpy().tobytes())
        return digest.digest()

    # --- steps ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active or optimizer in self._optimizers:
            return
        if _context.current.context is None:
            self.stop("no-init")
        self._optimizers[optimizer] = len(self._optimizers)
        if not self._where:
            self._where = _outside()
        with torch._C.DisableTorchFunction():
            self._name(optimizer)
            self._before |= {name: fingerprint(value) for name, value in self._parameters(optimizer)}
        # Behind all hooks that are there, so that it sees the gradients which step() is about to use.
        optimizer.register_step_pre_hook(self._at_step)

    def _at_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            self._start = {name: value.detach().clone() for name, value in self._parameters(optimizer)}
            return self.changes.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active or optimizer not in self._optimizers:
            return
        with torch._C.DisableTorchFunction():
            self._note_step(optimizer)
        self.changes.after_step(optimizer)
        self.steps += 1
        self.passes = 0
        self.raw.clear()
        self.watch.new_step()
        self.sources.new_step()
        self._random = self._random_state()

    def _note_step(self, optimizer: Optimizer) -> None:
        named = list(self._parameters(optimizer))
        given = {name: whole(value.grad) for name, value in named if value.grad is not None}
        gradients = {name: fingerprint(gradient) for name, gradient in given.items()}
        norm = _together(print_[0] for print_ in gradients.values())
        first = bool(self._before)
        self._write(
            Step(
                optimizer=self._optimizers[optimizer],
                rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
                batches=self._batches,
                gradients=gradients,
                norm=norm,
                raw_norm=_together(
                    float(self.raw[id(value)].double().norm()) for _, value in named if id(value) in self.raw
                ),
                parameters={name: fingerprint(value) for name, value in named},
                buffers={name: fingerprint(value) for name, value in self._buffers()},
                noise={
                    name: _unfounded(self._start[name], value, given[name], norm)
                    for name, value in named
                    if name in given
                },
                before=self._before,
                sizes={name: value.numel() for name, value in (*named, *self._buffers())} if first else {},
                metrics=self.metrics.take(),
                uses=sorted(self.uses),
            )
        )
        self._dtypes |= {str(value.dtype).removeprefix("torch.") for _, value in named}
        self._batches, self._before, self._start = [], {}, {}
        self.uses.clear()

    def _name(self, optimizer: Optimizer) -> None:
        """Names that a user knows: the script's own, or those in the outermost modules."""
        number = self._optimizers[optimizer]
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                self._names.setdefault(
                    id(parameter), f"parameter {index} of group {place}" + f" ({number})" * (number > 0)
                )
        for prefix, root in self._labelled():
            for name, parameter in root.named_parameters():
                self._names[id(parameter)] = prefix + _plain(name)
        given: Any = getattr(getattr(optimizer, "_hora", None), "names", {})
        for key, name in given.items():
            if isinstance(name, str) and not name.startswith("parameter "):
                self._names[key if isinstance(key, int) else id(key)] = name

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    self._name(optimizer)
                yield self._names[id(parameter)], parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, root in self._labelled():
            for name, value in root.named_buffers():
                if value.is_floating_point():
                    yield prefix + _plain(name), value

    def _labelled(self) -> list[tuple[str, torch.nn.Module]]:
        """The outermost modules, with what goes before the names in them when there are several."""
        if len(self.roots) == 1:
            return [("", self.roots[0])]
        return [(f"module {place}: ", root) for place, root in enumerate(self.roots, 1)]

    # --- the end --------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """End the script here, on every rank at the same place."""
        self._finish(why)
        if self._stopping:  # an `except:` or `finally:` of the script has gone on training
            sys.stdout.flush()
            os._exit(0)
        self._stopping = True
        raise SystemExit(0)

    def _finish(self, why: str) -> None:
        if self._ended or not self.active:
            return
        self._ended = True
        self._write(
            Ending(
                why=why,
                metrics=self.metrics.take(),
                dtypes=sorted(self._dtypes),
                unsaved=self._unsaved,
                batches=len(self._batches),
                where=self._where,
            )
        )
        self.sources.keep()

    def _write(self, row: Step | Ending) -> None:
        assert self._file is not None, "start() opened it"
        self._file.write(as_line(row))

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.save`` into a file: left out, so that no checkpoint of the user's is overwritten."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike) and self.active:
                self._unsaved += 1
                return None
            return original(obj, f, *args, **kwargs)

        return save


def _adder(sums: dict[int, torch.Tensor], key: int) -> Callable[[torch.Tensor], None]:
    def add(gradient: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            sums[key] = sums[key] + gradient.detach() if key in sums else gradient.detach().clone()

    return add


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _plain(name: str) -> str:
    """The name without what wrappers put in front, which may be there with several workers only."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _unfounded(before: torch.Tensor, now: torch.Tensor, gradient: torch.Tensor, norm: float) -> float:
    """Norm of the change where the gradient is rounding, which Adam blows up to full steps."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    limit = rounding(str(now.dtype).removeprefix("torch.")) * norm
    silent = gradient.detach().abs() <= limit
    return float((now.detach() - before)[silent].double().norm())


def _together(norms: Iterator[float]) -> float:
    return float(sum(norm * norm for norm in norms) ** 0.5)


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _outside() -> str:
    """``file:line`` of the script's line that led here."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

"""Writes down each step of an optimizer on this rank; the script is not changed."""

from __future__ import annotations

import functools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hora.core.journal import Entry, Journal, Span
from hora.torch import _context, _fetch

__all__ = ["Steps"]

PARAMETERS = 8
"""Parameters of which some elements are looked at."""

ELEMENTS = 64
"""Elements of each, evenly spread: enough that no step leaves all of them as they were."""


class Steps:
    """Follows the batches and the steps of this process.

    Args:
        folder: where the journal goes.
        worker: the lasting number of this worker.
        attempt: how often the ranks were started.
    """

    def __init__(self, folder: Path, *, worker: int, attempt: int) -> None:
        self._journal = Journal(folder)
        self._worker, self._attempt = worker, attempt
        self._pid = os.getpid()
        self._context: object = None
        self._number = 0
        self._pending: list[tuple[str, Span]] = []
        self._before: dict[int, int | None] = {}

    def start(self) -> None:
        """Look on from now on; called once, before the script."""
        for kind in (_fetch.TensorFetcher, _fetch.SampleFetcher):
            _follow(kind, self._handed_out)
        register_optimizer_step_pre_hook(self._at_step)
        register_optimizer_step_post_hook(self._after_step)

    def _handed_out(self, data: str, span: Span) -> None:
        """The script gets a batch."""
        self._new_world()
        # The same samples again: the step that they were for was given up.
        if any(name == data and span[:2] <= earlier[:2] for name, earlier in self._pending):
            self._pending = [(name, earlier) for name, earlier in self._pending if name != data]
        self._pending.append((data, span))

    def _new_world(self) -> None:
        if self._context is not _context.current.context:
            self._context = _context.current.context
            self._number = 0
            self._pending.clear()

    def _at_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid:
            self._before[id(optimizer)] = _checksum(optimizer)[0]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._new_world()
        self._number += 1
        # Batches of an evaluation in between are another loader's; the last one before a step is for it.
        data = self._pending[-1][0] if self._pending else None
        spans = tuple(span for name, span in self._pending if name == data)
        self._pending.clear()
        after, total = _checksum(optimizer)
        context = _context.current.context
        generation = 0 if context is None else context.generation
        self._journal.write(
            Entry(
                pid=self._pid,
                worker=self._worker,
                world=f"{self._attempt}:{generation}",
                rank=0 if context is None else context.world.rank,
                size=1 if context is None else context.world.size,
                number=self._number,
                time=time.time(),
                data=data,
                spans=spans,
                before=self._before.pop(id(optimizer), None),
                after=after,
                total=total,
            )
        )


def _follow(kind: Any, handed_out: Callable[[str, Span], None]) -> None:
    original = kind.fetch

    def fetch(self: Any, order: Any, shares: Any, *, seed: int, epoch: int) -> Iterator[Any]:
        batches = iter(original(self, order, shares, seed=seed, epoch=epoch))
        spans = [(epoch, start, stop) for start, stop in shares]
        return _told(batches, spans, functools.partial(handed_out, f"{len(order)} samples, seed {seed}"))

    kind.fetch = fetch


def _told(batches: Iterator[Any], spans: list[Span], handed_out: Callable[[Span], None]) -> Iterator[Any]:
    for span in spans:
        batch = next(batches)
        handed_out(span)
        yield batch


def _checksum(optimizer: Optimizer) -> tuple[int | None, float]:
    """Of some elements of the parameters, and the sum of their magnitudes; None where a rank has parts."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    chosen = parameters[:: max(1, -(-len(parameters) // PARAMETERS))]
    picked = []
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for value in chosen:
            if type(value.data) is not torch.Tensor:
                return None, 0.0
            flat = value.data.reshape(-1)
            picked.append(flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].double())
        if not picked:
            return None, 0.0
        numbers = torch.cat(picked).cpu()
    return zlib.crc32(numbers.numpy().tobytes()), float(numbers.abs().sum())

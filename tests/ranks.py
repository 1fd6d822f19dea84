"""Runs a test's body on several ranks, forked from the test process, so that it costs well under a second.

    @ranks(2)                # or ranks(1, 2, 3, 4): the test is repeated with each number
    def test_sum():
        assert hora.allreduce(torch.ones(()), op=hora.Sum) == hora.size()

The body runs on every rank after ``hora.init()``. :func:`run_ranks` does the same inside a test and
returns what the ranks return.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World

__all__ = ["RankFailure", "ranks", "run_ranks"]

LIMIT = 30.0
"""Seconds that the ranks of one test may take."""

GRACE = 5.0
"""Seconds that the others may go on after a rank has failed."""

# Forked ranks inherit what is imported, and no thread: one intra-op thread means that torch makes no pool.
torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what torch imports late


def ranks(*sizes: int) -> pytest.MarkDecorator:
    """Run the test on this many ranks; with several numbers, once for each."""
    return pytest.mark.ranks(*sizes)


class RankFailure(AssertionError):
    """A rank failed; the text holds every rank's traceback, or its stack if it did not end in time."""


@dataclass
class _Rank:
    number: int
    pid: int
    pipe: int
    stacks: Path
    received: bytes = b""

    @property
    def outcome(self) -> tuple[str, Any]:
        """("ok", result), ("error", traceback), ("skip", reason) or ("lost", nothing)."""
        return pickle.loads(self.received) if self.received else ("lost", None)


def run_ranks(
    size: int, body: Callable[..., Any], *args: Any, limit: float = LIMIT, init: bool = True, **settings: Any
) -> list[Any]:
    """Call ``body(*args)`` on ``size`` forked ranks; the results, in the order of ranks.

    Args:
        limit: seconds after which all ranks are killed and their stacks shown.
        init: whether ``hora.init()`` is called before the body.
        settings: fields of ``Settings`` that differ from the harness's own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="hora-ranks-") as folder:
        chosen = Settings(
            **{"store": f"file://{folder}/store", "timeout": limit, "progress": "off"} | settings
        )
        started: list[_Rank] = []
        try:
            for number in range(size):
                world = World(
                    rank=number,
                    size=size,
                    local_rank=number,
                    local_size=size,
                    host_index=0,
                    host_count=1,
                    source="test",
                )
                started.append(_fork(world, chosen, Path(folder), body, args, init=init, siblings=started))
            overdue = _collect(started, limit=limit)
        finally:
            for rank in started:
                _reap(rank)
    failures = [rank for rank in started if rank.outcome[0] in ("error", "lost")]
    if failures:
        raise RankFailure("\n".join(_describe(rank, overdue) for rank in failures))
    for rank in started:
        if rank.outcome[0] == "skip":
            pytest.skip(rank.outcome[1])
    return [rank.outcome[1] for rank in started]


def _fork(
    world: World,
    settings: Settings,
    folder: Path,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    init: bool,
    siblings: list[_Rank],
) -> _Rank:
    reader, writer = os.pipe()
    stacks = folder / f"stack-{world.rank}"
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Rank(world.rank, pid, reader, stacks)
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the tests
        for sibling in siblings:
            os.close(sibling.pipe)
        # Kept open on purpose: the handler writes to it while the interpreter may be stuck.
        faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
        outcome = _outcome(world, settings, body, args, init=init)
        data = pickle.dumps(outcome)
        while data:
            data = data[os.write(writer, data) :]
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not return into pytest
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _outcome(
    world: World, settings: Settings, body: Callable[..., Any], args: tuple[Any, ...], *, init: bool
) -> tuple[str, Any]:
    try:
        if init:
            hora.init(world, settings=settings)
        result = body(*args) if init else body(world, settings, *args)
        hora.shutdown()
        pickle.dumps(result)
    except pytest.skip.Exception as skipped:
        return "skip", str(skipped)
    except BaseException:  # noqa: BLE001 - every failure is the parent's to show
        return "error", traceback.format_exc()
    return "ok", result


def _collect(started: list[_Rank], *, limit: float) -> set[int]:
    """Read the outcomes; the numbers of the ranks that did not end in time, whose stacks were asked for."""
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        for rank in started:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = deadline - time.monotonic()
            events = selector.select(max(left, 0))
            if not events and left <= 0:
                break
            for key, _ in events:
                rank: _Rank = key.data
                data = os.read(rank.pipe, 1 << 20)
                rank.received += data
                if data:
                    continue
                selector.unregister(rank.pipe)
                if rank.outcome[0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        overdue = {key.data.number for key in selector.get_map().values()}
        for rank in started:
            if rank.number in overdue:
                os.kill(rank.pid, signal.SIGUSR1)
        if overdue:
            time.sleep(0.3)  # there is no event to wait for: the ranks write their stacks
    return overdue


def _reap(rank: _Rank) -> None:
    with contextlib.suppress(ProcessLookupError):
        if not rank.received:
            os.kill(rank.pid, signal.SIGKILL)
    os.waitpid(rank.pid, 0)
    os.close(rank.pipe)


def _describe(rank: _Rank, overdue: set[int]) -> str:
    if rank.number in overdue:
        stack = rank.stacks.read_text() if rank.stacks.exists() else ""
        return f"--- rank {rank.number} did not end in time; it was at\n{stack}"
    return f"--- rank {rank.number}\n{rank.outcome[1] or 'ended without a word'}"

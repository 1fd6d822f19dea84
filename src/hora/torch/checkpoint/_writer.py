"""Saving: what is done while training waits, and the thread that does the rest.

While training waits, the ranks agree on the folder and on who writes what, and each copies what it has to
write. The plan is made once, by DCP's planner, and again only when the objects have changed.
The thread calls no collective: what the ranks have written they tell through the job's store.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.optim import Optimizer

from hora.adapter.guard import collective
from hora.core import commits
from hora.core.commits import Commit, Place
from hora.core.errors import CheckpointError, HoraError, RunDirectoryError
from hora.core.lock import DirectoryLock
from hora.torch._context import Context
from hora.torch._objects import send_object
from hora.torch._wire import start_gather, wait_for
from hora.torch.checkpoint import _layout
from hora.torch.checkpoint._collect import collect
from hora.torch.checkpoint._plan import Copy, Plans, signature
from hora.torch.checkpoint._save import Policy, Save
from hora.torch.checkpoint._storage import write_file
from hora.torch.checkpoint._tell import Teller

__all__ = ["Writer"]

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
"""Seconds between looks for the other ranks' words in the store; the pause doubles."""

NICE = 10
"""Of the thread: where cores are scarce, training has nine times its share, by Linux's table of weights."""

LAST_WORDS = 3.0
"""Seconds that a failing rank waits until what it has copied is written: others may go on from there."""


@dataclass(kw_only=True)
class _Work:
    save: Save
    number: int
    place: Place
    data: torch.Tensor
    values: bytes
    layout: bytes
    policy: Policy
    copy: Copy


class Writer:
    """Writes the checkpoints of one directory.

    Args:
        context: of the job.
        directory: where.
        teller: told in rank 0 how the writing went.

    Attributes:
        damaged: folders with a marker that were found not to be good.
    """

    def __init__(self, context: Context, directory: Path, teller: Teller) -> None:
        self.directory = directory
        self.damaged: set[Path] = set()
        self.context = context
        self._rank, self._size = context.world.rank, context.world.size
        self._teller = teller
        self._lock: DirectoryLock | None = None
        self._plans = Plans(context)
        self._last: Save | None = None
        self._number = 0
        self._place: Place | None = None
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._later = True
        self._copy: Copy | None = None
        self._watched: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._store: Any = None
        self._spans: collections.deque[tuple[float, float]] = collections.deque()
        # Equal on all ranks: they make the same writers, though not each of them in the same worlds before.
        self._serial = _serials[context] = _serials.get(context, -1) + 1

    # --- while training waits -------------------------------------------------------------------

    def claim(self) -> None:
        """Take the directory for this run. Every rank calls it.

        Raises:
            CheckpointError: another run has it.
            RunDirectoryError: it cannot be written.
        """
        problem: HoraError | None = None
        try:
            self._lock_it()
        except (CheckpointError, RunDirectoryError) as error:
            problem = error
        problem = send_object(problem, 0, self.context)
        if problem is not None:
            raise problem

    def _lock_it(self) -> None:
        if self._lock is None and self._rank == 0:
            run = self.context.run
            about = {"run": None if run is None else str(run.path), "job": self.context.settings.job}
            self._lock = DirectoryLock.take(self.directory, about)

    def save(self, state: Mapping[str, Any], step: int, policy: Policy) -> Save:
        """Copy the state and have it written. Every rank calls it at the same step.

        Raises:
            CheckpointError: the ranks are at different steps, an object cannot be saved, or another run
                writes to the directory.
        """
        context = self.context
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"step={step!r} is not a number of steps.", fix="Write save(state, step=100)."
            )
        policy.check()
        self._show()
        collected = collect(state, rank=self._rank, device=context.device)
        if self._last is not None:
            self._last._written.wait()  # its buffer is used again
        attempt, error = self._prepare(step) if self._rank == 0 else (0, None)
        own = signature(collected.tensors)
        told = self._exchange([own, step, attempt])
        if isinstance(error, CheckpointError):
            raise error
        steps, attempt = [line[1] for line in told], told[0][2]
        if attempt == _REFUSED:
            raise CheckpointError(
                f"Checkpoints in {self.directory} are written by another run.",
                fix="Rank 0 says which; give this run a directory of its own: hora run --checkpoints DIR.",
            )
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"The ranks save different steps: {steps}.", fix="Call save at the same step on every rank."
            )
        save = Save(step, commits.place_of(self.directory, step, max(attempt, 1)).path)
        if attempt == _FAILED:
            reason = "rank 0 could not make its folder" if error is None else _reason(error)
            if self._rank == 0:
                self._teller.failed(step, reason)
            save._ended_with(reason)
            return save
        planned = self._plans.planned(collected, tuple(line[0] for line in told))
        copy = self._copy = Copy(planned, collected, context.device, later=self._later)
        for optimizer in collected.optimizers:
            self._watch(optimizer)
        self._number += 1
        self._last = save
        self._begin().put(
            _Work(
                save=save,
                number=self._number,
                place=commits.place_of(self.directory, step, attempt),
                data=planned.buffer,
                values=collected.text(),
                layout=planned.layout,
                policy=policy,
                copy=copy,
            )
        )
        return save

    def _watch(self, optimizer: Optimizer) -> None:
        """Let the steps of an optimizer wait until its state is copied."""
        if optimizer not in self._watched:
            hook = functools.partial(_settle, weakref.ref(self))
            self._watched[optimizer] = optimizer.register_step_pre_hook(hook)

    def _show(self) -> None:
        """Put what the thread has done into the timeline, which is this thread's."""
        while self._spans:
            self.context.timeline.add("write checkpoint", *self._spans.popleft(), lane="checkpoints")

    def _prepare(self, step: int) -> tuple[int, Exception | None]:
        """Make the folder; its attempt, or why there is none."""
        try:
            self._lock_it()
            # The thread may look for folders without a marker to remove them at any moment.
            place = self._place = commits.free_place(self.directory, step)
            place.path.mkdir()
        except CheckpointError as error:
            return _REFUSED, error
        except (RunDirectoryError, OSError) as error:
            return _FAILED, error
        return place.attempt, None

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        if self._size == 1:
            return [numbers]
        context = self.context
        from hora.torch._process_sets import global_process_set

        mine = torch.tensor(numbers, dtype=torch.int64, device=context.control)
        everyone = mine.new_empty(self._size * len(numbers))
        with collective(context, "save"):
            context.presence.call("save", global_process_set)
            wait_for(start_gather(everyone, mine, context.group), mine, context.group)
        told: list[list[int]] = everyone.view(self._size, -1).tolist()
        return told

    # --- in the thread --------------------------------------------------------------------------

    def _begin(self) -> queue.SimpleQueue[_Work | None]:
        if self._thread is None:
            if self._size > 1:
                self._store = _clone(dist.distributed_c10d._get_default_store())
            self._thread = threading.Thread(target=self._run, name="hora-checkpoints", daemon=True)
            self._thread.start()
        return self._works

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (work := self._works.get()) is not None:
            started = time.time()
            try:
                self._finish(work, *self._write(work))
            except _StoppedError:
                work.save._ended_with("the job ended before all ranks had written")
            except Exception as error:  # noqa: BLE001 - training goes on; it is told
                self._give_up(work, _reason(error))
            self._spans.append((started, time.time()))

    def _write(self, work: _Work) -> tuple[dict[str, tuple[int, str]], str | None]:
        """Write this rank's files; their sizes and digests, or why they could not be written."""
        files: dict[str, tuple[int, str]] = {}
        try:
            if not work.copy.finish():
                self._later = False
                return (
                    {},
                    "the optimizer's state was changed by something else than step() while it was copied",
                )
            tensors, values = _layout.rank_files(self._rank)
            files[tensors] = write_file(work.place.path / tensors, work.data.numpy())
            files[values] = write_file(work.place.path / values, work.values)
            if self._rank == 0:
                files[_layout.LAYOUT] = write_file(work.place.path / _layout.LAYOUT, work.layout)
        except Exception as error:  # noqa: BLE001 - rank 0 must hear of it, and tells it
            return {}, _reason(error)
        finally:
            work.save._written.set()
        return files, None

    def _finish(self, work: _Work, files: dict[str, tuple[int, str]], error: str | None) -> None:
        if self._rank != 0:
            self._store.set(self._key(work, self._rank), json.dumps({"files": files, "error": error}))
            answer = json.loads(self._hear(self._key(work, "end")))
            work.save._ended_with(answer)
            return
        problems = {} if error is None else {0: error}
        for rank in range(1, self._size):
            key = self._key(work, rank)
            word = json.loads(self._hear(key))
            self._store.delete_key(key)
            files |= {name: (size, digest) for name, (size, digest) in word["files"].items()}
            if word["error"] is not None:
                problems[rank] = word["error"]
        if problems:
            rank, reason = min(problems.items())
            self._give_up(work, reason if self._size == 1 else f"rank {rank}: {reason}")
            return
        try:
            for name, (size, _) in files.items():
                if (work.place.path / name).stat().st_size != size:
                    raise OSError(f"{name} has another size than was written")
            made = Commit(step=work.place.step, world=self._size, files=files, time=time.time())
            commits.write(work.place.path, made)
        except FileNotFoundError as missing:
            self._give_up(
                work, f"{missing.filename} is not there on rank 0's host: all hosts must see one directory"
            )
            return
        except OSError as failed:
            self._give_up(work, _reason(failed))
            return
        self._answer(work, None)
        self._teller.written(work.place.step)
        self._prune(work)

    def _prune(self, work: _Work) -> None:
        try:
            there = commits.places(self.directory)
            # Looked at after that: the next folder is made when it is known here.
            own = self._place
            gone = commits.prune(
                there,
                keep=work.policy.keep,
                keep_every=work.policy.keep_every,
                damaged=self.damaged,
                spare=() if own is None or own == work.place else (own.path,),
            )
            self.damaged -= {place.path for place in gone}
        except OSError as error:
            self._teller.left(work.place.step, _reason(error))

    def _give_up(self, work: _Work, reason: str) -> None:
        """The checkpoint cannot be written: say so, and free what it has taken. Earlier ones stay."""
        if self._rank == 0:
            self._teller.failed(work.place.step, reason)
            with contextlib.suppress(OSError):  # the next commit removes what has no marker
                commits.remove(work.place.path)
            with contextlib.suppress(DistError):  # the job ends
                self._answer(work, reason)
        work.save._ended_with(reason)

    def _answer(self, work: _Work, error: str | None) -> None:
        work.save._ended_with(error)
        if self._size > 1:
            self._store.set(self._key(work, "end"), json.dumps(error))
            if work.number > 2:
                # Everybody has heard how it ended: they have told of a later one since.
                self._store.delete_key(self._key(work, "end", back=2))

    def _key(self, work: _Work, what: int | str, *, back: int = 0) -> str:
        return f"hora/checkpoints/{self._serial}/{work.number - back}/{what}"

    def _hear(self, key: str) -> bytes:
        """What another rank says, when it has said it. A store has no event that could be waited for."""
        pause = FIRST_PAUSE
        while not self._store.check([key]):
            if self._stop.wait(pause):
                raise _StoppedError
            pause = min(2 * pause, LONGEST_PAUSE)
        data: bytes = self._store.get(key)
        return data

    # --- the end --------------------------------------------------------------------------------

    def close(self, *, failing: bool) -> None:
        """Finish what is being written, and let others have the directory."""
        if self._thread is not None:
            self._works.put(None)
            if failing or self._rank != 0:
                self._stop.set()  # what this rank has copied is written, and that is all
            self._thread.join(LAST_WORDS if failing else self.context.settings.timeout)
            self._stop.set()
            self._show()
        for hook in self._watched.values():
            hook.remove()
        if self._lock is not None:
            self._lock.release()


def _settle(writer: weakref.ref[Writer], *_: Any) -> None:
    found = writer()
    if found is not None and found._copy is not None:
        found._copy.wait()
        found._copy = None


_FAILED, _REFUSED = -1, -2
_serials: weakref.WeakKeyDictionary[Context, int] = weakref.WeakKeyDictionary()


def _reason(error: Exception) -> str:
    if isinstance(error, HoraError):
        return error.what.rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _clone(store: Any) -> Any:
    """Another connection: a thread that waits keeps the one that it waits on to itself."""
    return store.clone()


class _StoppedError(Exception):
    """The job ends while others have not said how their writing went."""

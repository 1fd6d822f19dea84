"""The one context of this worker: who it is, and the engine that carries its tensors."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tensorflow as tf
from tensorflow.python.autograph.pyct import origin_info

from hora.adapter import context as adapter
from hora.adapter import frames
from hora.adapter.current import Current
from hora.adapter.guard import Guard as AdapterGuard
from hora.core import futex
from hora.core.errors import SettingError, WorldError
from hora.core.plural import plural
from hora.core.settings import Settings
from hora.core.world import World
from hora.tensorflow import _engine, _raised, _watch
from hora.tensorflow._engine import Engine
from hora.tensorflow._shared import SharedEngine
from hora.tensorflow._watch import Steps

if TYPE_CHECKING:
    from hora.tensorflow._process_sets import ProcessSet

__all__ = [
    "Context",
    "Guard",
    "context",
    "cross_rank",
    "cross_size",
    "current",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "required",
    "shutdown",
    "size",
]

AUTOGRAPH = "__autograph_generated_file"
"""How the files begin in which TensorFlow puts what it makes of a ``tf.function``."""

THREADS = "TF_NUM_INTRAOP_THREADS"
"""TensorFlow's own variable for the number of threads that compute one operation."""


def _origin(frame: FrameType) -> tuple[str, int] | None:
    """The line of a ``tf.function`` of which TensorFlow has made what this frame runs."""
    here = origin_info.LineLocation(frame.f_code.co_filename, frame.f_lineno)
    caller: FrameType | None = frame.f_back
    while caller is not None:
        known = getattr(caller.f_locals.get("converted_f"), "ag_source_map", None)
        found = known.get(here) if known is not None else None
        if found is not None:
            return found.loc.filename, found.loc.lineno
        caller = caller.f_back
    return None


frames.pass_over("<__array_function__")
frames.translate(str(Path(tempfile.gettempdir()) / AUTOGRAPH), _origin)
_raised.install()


@dataclass(eq=False, kw_only=True)
class Context(adapter.Context):
    """What one ``init()`` decided.

    Attributes:
        guard: what reports to the supervisor; None without one.
        running: the engine; None only while it starts.
        uses_gpu: whether this worker computes on a GPU.
        steps: what is watched of each set of variables that averaged gradients train.
    """

    guard: Guard | None = None
    running: Engine | SharedEngine | None = None
    uses_gpu: bool = False
    steps: dict[tuple[int, ...], Steps] = field(default_factory=dict)

    def steps_of(
        self, variables: Sequence[Any], process_set: ProcessSet, *, scaled: bool = False
    ) -> Steps | None:
        """What is watched of the steps of these variables; None without a guard.

        Args:
            variables: whose gradients are averaged.
            process_set: the ranks that take part.
            scaled: see :class:`Steps`.
        """
        if self.watch is None or len(process_set.members) == 1:
            return None
        key = tuple(map(id, variables))
        found = self.steps.get(key)
        if found is None or not found.is_of(variables):
            found = self.steps[key] = Steps(
                self.watch,
                variables,
                process_set.members,
                scaled=scaled,
                timeline=lambda: self.timeline,
            )
        return found

    @property
    def engine(self) -> Engine | SharedEngine:
        """What carries the tensors."""
        assert self.running is not None
        return self.running


class Guard(AdapterGuard):
    """The guard's half in this rank; the engine's errors have causes, too."""

    failures: ClassVar[tuple[type[BaseException], ...]] = (*AdapterGuard.failures, tf.errors.OpError)


current: Current[Context] = Current("hora.tensorflow")

rank = current.rank
size = current.size
local_rank = current.local_rank
local_size = current.local_size
cross_rank = current.cross_rank
cross_size = current.cross_size
is_homogeneous = current.is_homogeneous
is_initialized = current.is_initialized
required = current.required

before_leaving: list[Callable[[], None]] = []
"""Called by ``shutdown()`` first: what is built on the context ends before it."""


def init(
    world: World | None = None,
    *,
    settings: Settings | None = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] = (),
) -> None:
    """Join the job: find the other workers and agree with them on who is who.

    Call it once, before anything else of ``hora.tensorflow`` and before TensorFlow computes anything where
    that is possible. Started by plain ``python`` there is one worker, and the same script runs unchanged.

    Args:
        world: this worker's place, when the launcher's variables do not say (see ``hora.core.world``).
        settings: overrides the ``HORA_*`` variables.
        process_sets: sets to add at once, the same on every rank. More can be added at any time; the word
            "dynamic", which Horovod wants for that, is accepted.

    Raises:
        AlreadyInitializedError: a second call without :func:`shutdown` in between.
        WorldError: launch variables that are partial or contradictory, ranks that do not come within
            ``HORA_TIMEOUT`` seconds, or a process that was in a job of other ranks before.
        SettingError: ``HORA_DEVICE=cuda`` on a host without a GPU.
        RunDirectoryError: the run directory cannot be used.
    """
    from hora.tensorflow._process_sets import add_process_set, global_process_set  # they build on this module

    adapter.join(
        current,
        Context,
        everyone=global_process_set,
        where=adapter.caller(1),
        world=world,
        settings=settings,
        guard=Guard,
        start=_start,
        frameworks={"tensorflow": tf.__version__},
        leave_at_exit=shutdown,
    )
    if process_sets != "dynamic":
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the job. Without ``init()`` it does nothing.

    Every worker calls it at the same place, or none does: it also happens when the interpreter ends.
    Afterwards ``init()`` may be called again, in the same world.
    """
    if current.context is not None and current.context.pid == os.getpid():
        for call in before_leaving:
            call()
    adapter.leave(current)


def context() -> Context:
    """The context that ``init()`` made.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return required("context")


def _start(joined: Context) -> None:
    joined.uses_gpu = _choose_device(joined.world, joined.settings)
    _share_cores(joined.world)
    shared = _shared_memory(joined)
    joined.running = engine = shared or _engine.start(
        rank=joined.world.rank,
        size=joined.world.size,
        timeout=_timeout(joined),
        gpu=joined.uses_gpu,
        one_host=joined.world.host_count == 1,
        meet=lambda mine: [
            told.decode() for told in joined.exchange("addresses of the engine", mine.encode())
        ],
    )
    if joined.watch is not None:
        joined.closing.append(_watch.follow(joined.watch, lambda: joined.timeline))
    joined.engines["cuda" if joined.uses_gpu else "cpu"] = "tensorflow" if shared is None else "shared-memory"
    if joined.guard is not None:
        joined.guard.reporter.on_alarm.append(lambda: engine.abort("The guard stops the job."))


def _shared_memory(joined: Context) -> SharedEngine | None:
    """The engine of ranks of one host; None: TensorFlow's own runtime carries the tensors.

    Raises:
        WorldError: ``HORA_ENGINE=shared-memory`` where memory cannot be shared.
    """
    wanted = joined.settings.engine
    if joined.world.size == 1 or wanted == "gloo":
        return None
    problem = "the ranks are on several hosts" if joined.world.host_count != 1 else ""
    problem = "tensors are on the GPU" if joined.uses_gpu else problem
    problem = problem or ("" if futex.AVAILABLE else "this system has no futexes")
    if not problem:
        engine = SharedEngine(
            timeout=_timeout(joined),
            tell=lambda what, group, mine: joined.exchange(
                f"{what} of the engine", mine, process_set=joined.process_sets.get(group.number)
            ),
        )
        try:
            engine.prepare(_engine.Group(0, joined.world.size, joined.world.rank))
        except OSError as error:
            problem = str(error)
        else:
            return engine
    if wanted == "shared-memory":
        raise WorldError(f"HORA_ENGINE=shared-memory, but {problem}.", fix="Unset HORA_ENGINE.")
    return None


def _timeout(joined: Context) -> float:
    """Seconds after which the engine itself gives up. Under the guard, which sees all waits and applies
    ``HORA_TIMEOUT`` with a reason, in practice never.
    """
    return joined.settings.timeout if joined.guard is None else 30 * 24 * 3600.0


def _share_cores(world: World) -> None:
    """Let each rank of a host compute with its share of the cores, unless the user said how many threads.

    All ranks compute at the same time; with a thread for each core in each rank, they wait for one another.
    """
    chosen = tf.config.threading.get_intra_op_parallelism_threads() or os.environ.get(THREADS)
    if world.local_size > 1 and not chosen:
        with contextlib.suppress(RuntimeError):  # TensorFlow has computed something: too late, and no fault
            share = max(1, len(os.sched_getaffinity(0)) // world.local_size)
            tf.config.threading.set_intra_op_parallelism_threads(share)


def _choose_device(world: World, settings: Settings) -> bool:
    """Show TensorFlow this worker's own GPU only; whether there is one.

    Raises:
        SettingError: ``HORA_DEVICE=cuda`` on a host without a GPU.
        WorldError: more workers than GPUs.
    """
    if settings.device == "cpu":
        return False
    found: list[Any] = tf.config.get_visible_devices("GPU")
    if not found:
        if settings.device == "cuda":
            raise SettingError(
                "HORA_DEVICE=cuda, but TensorFlow finds no GPU here.",
                fix="Set HORA_DEVICE=cpu, or install tensorflow[and-cuda] on a host with a GPU.",
            )
        return False
    if len(found) == 1:
        return True  # the script, or Slurm, shows each worker its own
    if len(found) < world.local_size:
        raise WorldError(
            f"There are {world.local_size} workers on this host, but {len(found)} "
            f"{plural(len(found), 'GPU')}.",
            fix=f"Start {len(found)} {plural(len(found), 'worker')} here, or set HORA_DEVICE=cpu.",
        )
    tf.config.set_visible_devices(found[world.local_rank], "GPU")
    return True

"""JAX's own runtime of several processes: brought up, and left without waiting for ranks that are gone.

``jax.distributed`` needs an address of rank 0, which the ranks tell each other through the store, and has
to be started before anything in the process computes. At the end of a process it holds a barrier of all of
them, which hangs when one has failed. So the ranks first tell each other that they have come to their end:
when all have, JAX may hold its barrier; when one cannot, or the job is to stop, JAX is left as it is.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import socket
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import jax
from jax._src import api, dispatch, xla_bridge  # what follows has no public face
from jax._src import distributed as _distributed

from hora.adapter.context import Context, is_failing
from hora.core.errors import AlreadyInitializedError, WorldError
from hora.core.settings import Settings
from hora.core.world import World

__all__ = ["check_unused", "choose_device", "device_of", "part", "start"]

FOREVER = 30 * 24 * 3600
"""Seconds after which JAX itself gives a rank up under the guard: never in practice. The supervisor judges
late ranks, and does not while one is declared to be busy alone."""

FLAGS = ("xla_cpu_collective_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")
"""Of XLA on the CPU: how long a collective waits for the other ranks."""

AT_THE_END = 5.0
"""Seconds in which all ranks come to the end of their processes, when they have left the job together."""

_connected: Context | None = None
_made_here = False


def choose_device(settings: Settings) -> None:
    """Let JAX use what the settings say: HORA_DEVICE."""
    platforms = {"cpu": "cpu", "cuda": "cuda,cpu"}.get(settings.device)
    if platforms is not None and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", platforms)


def check_unused() -> None:
    """Raise AlreadyInitializedError if something has been computed: ranks cannot be connected any more."""
    if xla_bridge.backends_are_initialized():
        raise AlreadyInitializedError(
            "JAX was used before hora.jax.init(): an array, a random key or a look at jax.devices() "
            "starts it on this process alone, and it cannot be connected to the other ranks any more.",
            fix="Write `import hora.jax as hora; hora.init()` before the first line that uses jax or "
            "jax.numpy.",
        )


def start(context: Context) -> None:
    """Connect the ranks' JAX, unless the script has, or an earlier ``init()``.

    Raises:
        AlreadyInitializedError: JAX was used before.
        WorldError: the script's own connection is of another rank or size; or the ranks cannot connect.
    """
    global _connected, _made_here
    world, settings = context.world, context.settings
    if jax.distributed.is_initialized():
        _check_own(world)
        _connected = _connected or context
        return
    check_unused()
    # The supervisor judges late ranks where there is one.
    seconds = FOREVER if context.guard is not None else math.ceil(settings.timeout)
    _set_flags(seconds)
    jax.config.update("jax_enable_recoverability", True)  # the end of a rank aborts no other but by rank 0
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    holder = _reserve(world) if world.rank == 0 else None
    try:
        if holder is not None:
            here = f"{_host(world, settings)}:{holder.getsockname()[1]}"
            context.store.set(context.key("address of JAX"), here.encode())
        address = context.store.get(context.key("address of JAX")).decode()
        port = address.rpartition(":")[2]
        jax.distributed.initialize(
            address,
            world.size,
            world.rank,
            local_device_ids=_own_gpu(world),
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(settings.timeout),
            heartbeat_timeout_seconds=seconds,
            shutdown_timeout_seconds=math.ceil(min(settings.timeout, 60)),
            coordinator_bind_address=f"127.0.0.1:{port}" if _on_one_host(world) else f"[::]:{port}",
        )
        jax.devices()  # the first look connects the ranks
    except RuntimeError as error:
        raise WorldError(
            f"The {world.size} ranks met, but JAX could not connect them: {error}",
            fix="Look at the log of the first rank that failed, or raise HORA_TIMEOUT if starting takes "
            "longer.",
        ) from error
    finally:
        if holder is not None:
            holder.close()
    _connected, _made_here = context, True


def device_of(world: World) -> jax.Device:
    """The device of this rank."""
    own = jax.local_devices()
    return own[world.local_rank] if len(own) == world.local_size > 1 else own[0]


def part(leave: Callable[[], None]) -> None:
    """The interpreter ends: leave the job, and JAX's processes together with the other ranks, or at once.

    Registered after JAX's own handlers, it runs before them.
    """
    leave()
    context = _connected
    if context is None:
        return
    if context.pid == os.getpid() and not is_failing() and _end_together(context):
        return
    _abandon()
    if is_failing() and context.settings.job is None:  # else the launcher's part ends it, with its exit code
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _end_together(context: Context) -> bool:
    """End JAX's part, if all ranks have come to their end: rank 0, which serves the others, comes last."""
    rank, size = context.world.rank, context.world.size
    try:
        context.store.exchange("end of JAX", b"", index=rank, count=size, timeout=AT_THE_END)
        if not _made_here:
            return True  # JAX holds its barrier
        if rank != 0:
            api.clean_up()
        context.store.exchange("end of JAX on rank 0", b"", index=rank, count=size, timeout=AT_THE_END)
    except WorldError:  # a rank has failed or ended, which is told elsewhere: this one only must not wait
        return False
    return True


def _abandon() -> None:
    """Leave JAX as it is to the end of the process: what it does at its end would wait for ranks that are
    gone.

    Its handlers are taken off. It keeps its parts in one object and shuts down what it finds there; they
    are kept alive, by references that are never given back, as their destructors wait, too.
    """
    for handler in (api.clean_up, dispatch.wait_for_tokens):
        atexit.unregister(handler)
    for backend in list(xla_bridge._backends.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
    state = _distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        kept = getattr(state, name)
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            setattr(state, name, None)


def _check_own(world: World) -> None:
    rank, size = jax.process_index(), jax.process_count()
    if (rank, size) != (world.rank, world.size):
        raise WorldError(
            f"jax.distributed is initialized with process {rank} of {size}, but {world.source} says rank "
            f"{world.rank} of {world.size}.",
            fix="Call hora.jax.init() first, and leave jax.distributed.initialize() out.",
        )


def _set_flags(seconds: int) -> None:
    """XLA reads them once, when it is first used."""
    flags = os.environ.get("XLA_FLAGS", "")
    more = [f"--{name}={seconds}" for name in FLAGS if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *more]).strip()


def _on_one_host(world: World) -> bool:
    return world.local_size == world.size


def _reserve(world: World) -> socket.socket:
    """A free port of this host, kept from others until JAX's coordinator listens there.

    gRPC binds with ``SO_REUSEPORT``; so can whoever has bound so before, and nobody else.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1" if _on_one_host(world) else "", 0))
    return holder


def _host(world: World, settings: Settings) -> str:
    """The name by which the other ranks reach this host."""
    if _on_one_host(world):
        return "127.0.0.1"
    store = urlsplit(settings.store or "")
    name = store.hostname if store.scheme == "tcp" else os.environ.get("MASTER_ADDR")
    return name or socket.gethostname()


def _own_gpu(world: World) -> list[int] | None:
    """Which of the host's GPUs this rank uses; None where it sees one only, or none is asked for."""
    platforms = jax.config.jax_platforms or ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if platforms.split(",")[0] == "cpu" or (visible is not None and len(visible.split(",")) == 1):
        return None
    return [world.local_rank]

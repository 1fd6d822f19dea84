"""Horovod's interface for Keras on Hora: ``import horovod.keras as hvd`` under ``hora run --horovod``, and
``import horovod.tensorflow.keras as hvd``.

Arguments have Horovod's order and defaults; what they mean is the affair of :mod:`hora.keras`. On TensorFlow,
``init`` is that of ``horovod.tensorflow`` too: a script may use both modules, whichever it has initialized.
"""

# ruff: noqa: PLR0917 - scripts written for Horovod pass these arguments by position
from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from hora.adapter.queries import ccl_built, ddl_built, mpi_built, mpi_enabled, mpi_threads_supported
from hora.core.errors import UsageError
from hora.keras import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hora.keras import _models as models
from hora.keras import _values as values
from hora.keras import add_process_set as _add
from hora.keras import init as _init
from hora.keras import remove_process_set as _remove
from hora.keras._backend import BACKEND, api
from hora.keras._optimizer import DistributedOptimizer as Distribute
from hora.keras._optimizer import PartialDistributedOptimizer as DistributePartially
from hora.keras._variables import broadcast_global_variables as broadcast_model

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_job: Any = importlib.import_module("hora.tensorflow.horovod") if BACKEND == "tensorflow" else None
"""Horovod's interface for the backend, whose job this is, too."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job. A second call changes nothing.

    Args:
        comm: None, or a list of all ranks.
        process_sets: sets to make usable at once; or ``"dynamic"``, to add them later.

    Raises:
        ValueError: another ``comm``, or process sets that cannot be made.
        WorldError: the ranks do not find each other.
    """
    if _job is not None:
        _job.init(comm, process_sets)
        _init()
        return
    if isinstance(process_sets, str):
        process_sets = None  # they always are dynamic on the other backends
    _init(**({"process_sets": process_sets} if process_sets is not None else {}))
    if comm and sorted(comm) != list(range(size())):
        shutdown()
        raise UsageError(
            f"comm={comm!r} are not all ranks.",
            fix="Write hvd.init(process_sets=[hvd.ProcessSet([0, 1])]) for a part of them.",
        )


def add_process_set(process_set: Any) -> Any:
    """Make a process set usable. All ranks call it, in the same order."""
    return _add(process_set) if _job is None else _job.add_process_set(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Give up a process set. All ranks call it, in the same order; whether it was removed."""
    return bool(_remove(process_set) if _job is None else _job.remove_process_set(process_set))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations from now on; rank 0 writes them to a file as a Chrome trace.

    Raises:
        UsageError: on JAX or PyTorch, where the run directory has a timeline of the whole run.
    """
    _recorder("start_timeline").start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Write the timeline that was started."""
    _recorder("stop_timeline").stop_timeline()


def _recorder(function: str) -> Any:
    if _job is None:
        raise UsageError(
            f"hvd.{function}() is for Keras on TensorFlow, and Keras runs on {BACKEND}.",
            fix="Leave it out, and open timeline.json in the run directory.",
        )
    return _job


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`hora.keras.DistributedOptimizer`; gradients of several backward passes are summed by default.

    Args:
        optimizer: any Keras optimizer.
        name: of the reduction.
        device_dense: no effect, as ``device_sparse``: tensors are reduced where they are.
        device_sparse: see ``device_dense``.
        compression: how gradients travel.
        sparse_as_dense: gradients of an embedding travel as a whole tensor.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies after.
        op: ``Average``, ``Sum`` or ``Adasum``.
        backward_passes_per_step: batches whose gradients add up before they are reduced.
        average_aggregated_gradients: those make a mean.
        num_groups: no effect, as ``groups``: all gradients of one dtype are one message.
        groups: see ``num_groups``.
        process_set: the ranks that take part.
        scale_local_gradients: no effect without local layers.
    """
    return Distribute(
        optimizer,
        name=name,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = (),
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`hora.keras.PartialDistributedOptimizer`; arguments as for :func:`DistributedOptimizer`."""
    return DistributePartially(
        optimizer,
        local_layers=local_layers or (),
        scale_local_gradients=scale_local_gradients,
        name=name,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    process_set: Any = global_process_set,
) -> Any:
    """:func:`hora.keras.allreduce`.

    Raises:
        UsageError: both ``average`` and ``op``.
    """
    if average is not None and op is not None:
        raise UsageError("allreduce got average= and op=.", fix="Write op=hvd.Average or op=hvd.Sum alone.")
    chosen = op if op is not None else Sum if average is False else Average
    return values.allreduce(
        value,
        name,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """:func:`hora.keras.allgather`."""
    return values.allgather(value, name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """:func:`hora.keras.broadcast`."""
    return values.broadcast(value, root_rank, name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: Any = Average, process_set: Any = global_process_set
) -> Any:
    """:func:`hora.keras.reducescatter`."""
    return values.reducescatter(value, name, op=op, process_set=process_set)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Give all ranks the variables of a model.

    Raises:
        UsageError: no model: Keras 3 has no list of all variables.
    """
    if model is None:
        raise UsageError(
            "broadcast_global_variables needs the model: Keras 3 keeps no list of all variables.",
            fix="Write hvd.broadcast_global_variables(0, model=model), or give fit "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0).",
        )
    broadcast_model(root_rank, model=model)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """:func:`hora.keras.load_model`; ``legacy_opts`` has no effect, as Keras 3 has no such optimizers."""
    return models.load_model(filepath, custom_optimizers, custom_objects, compression)


def process_set_included(process_set_id: int) -> bool:
    """Whether this worker is in the set of this id."""
    return bool(api.process_set_included(process_set_id))


def _built(name: str) -> bool:
    query = getattr(api, name, None)
    return bool(query()) if query is not None else False


def gloo_enabled() -> bool:
    """Whether Gloo can carry tensors."""
    return _built("gloo_enabled")


def gloo_built() -> bool:
    """Whether Gloo is there."""
    return _built("gloo_built")


def nccl_built() -> bool:
    """Whether NCCL is there."""
    return _built("nccl_built")


def cuda_built() -> bool:
    """Whether the framework is built for CUDA."""
    return _built("cuda_built")


def rocm_built() -> bool:
    """Whether the framework is built for ROCm."""
    return _built("rocm_built")

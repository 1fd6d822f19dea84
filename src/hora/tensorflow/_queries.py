"""What this installation can do, in the words of Horovod's queries, answered for what Hora really uses."""

from __future__ import annotations

import tensorflow as tf

from hora.adapter.queries import ccl_built, ddl_built, mpi_built, mpi_enabled, mpi_threads_supported

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def gloo_built() -> bool:
    """True, though TensorFlow's own runtime carries tensors on the CPU: Horovod's scripts mean by it that no
    MPI is needed.
    """
    return True


def gloo_enabled() -> bool:
    """True, as :func:`gloo_built` is."""
    return True


def nccl_built() -> int:
    """1 if this TensorFlow was built with CUDA, and has NCCL for tensors on GPUs; else 0."""
    return int(cuda_built())


def cuda_built() -> bool:
    """Whether this TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether this TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available() -> bool:
    """Whether TensorFlow finds a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))

"""Horovod's questions about engines that Hora never uses; the answers are the same for each framework."""

from __future__ import annotations

__all__ = ["ccl_built", "ddl_built", "mpi_built", "mpi_enabled", "mpi_threads_supported"]


def mpi_built() -> bool:
    """False: Hora moves no tensors by MPI. Jobs can still be started by ``mpirun``."""
    return False


def mpi_enabled() -> bool:
    """False, as :func:`mpi_built` is."""
    return False


def mpi_threads_supported() -> bool:
    """False, as :func:`mpi_built` is."""
    return False


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False

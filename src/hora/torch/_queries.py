"""What this installation can do, in the words of Horovod's queries, answered for what Hora really uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.queries import ccl_built, ddl_built, mpi_built, mpi_enabled, mpi_threads_supported
from hora.torch import _context, _rendezvous

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def gloo_built() -> bool:
    """Whether this PyTorch has the Gloo engine, which carries tensors on the CPU."""
    return bool(dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Whether Gloo carries tensors of this job; before ``init()``, whether it would."""
    if _context.is_initialized():
        # The shared-memory engine has a Gloo group, too, for what it does not carry.
        return not _rendezvous.PATIENT.isdisjoint(_rendezvous.engines(_context.context().group).values())
    return gloo_built()


def nccl_built() -> int:
    """Version of the NCCL engine in this PyTorch, which carries tensors on GPUs, as NCCL numbers it
    (22703 is 2.27.3); 0 without it.
    """
    if not dist.is_nccl_available():
        return 0
    version: Any = torch.cuda.nccl.version  # untyped in torch
    major, minor, patch = (*version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    return torch.version.hip is not None

"""What the agent on another host is told of the job: command, directory, what counts of the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hora.core.rundir import RunDirectory
from hora.core.version import VERSION
from hora.launch.job import FunctionTarget, Job, ModuleTarget, rank_environment

__all__ = ["begin"]

NAMES = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_ALL", "TZ"}
)
"""Variables that go along: with the same Python at the same place, its libraries are too."""

PREFIXES = (
    *("HORA_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NCCL_", "GLOO_", "UCX_", "FI_"),
    *("TORCH", "PYTORCH_", "CUDA_", "TF_", "XLA_", "JAX_", "KERAS_"),
)
"""The same, by how they begin. What else is set here is this host's own, or nobody else's business."""

LEFT = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Which devices are free differs between hosts."""


def begin(job: Job, run: RunDirectory, *, mark: str, slots: int, silence: float) -> dict[str, Any]:
    """The record that tells it.

    Args:
        job: what is run.
        run: its run directory, which the other host has at the same path, or makes there.
        mark: of the processes there.
        slots: workers that the host has at most.
        silence: seconds without a word after which it ends.
    """
    target = job.target
    assert not isinstance(target, FunctionTarget)
    module = isinstance(target, ModuleTarget)
    return {
        "version": VERSION,
        "directory": str(Path.cwd()),
        "module": module,
        "target": target.name if isinstance(target, ModuleTarget) else target.path,
        "arguments": list(job.arguments),
        "env": _environment(job),
        "run": str(run.path),
        "attempt": run.attempt,
        "mark": mark,
        "slots": slots,
        "elastic": job.elastic is not None,
        "silence": silence,
    }


def _environment(job: Job) -> dict[str, str]:
    found = {
        key: value
        for key, value in rank_environment(job).items()
        if (key in NAMES or key.startswith(PREFIXES)) and key not in LEFT
    }
    if "OMP_NUM_THREADS" not in os.environ:
        del found["OMP_NUM_THREADS"]  # the share of this host's cores; the other computes its own
    return found | dict(job.env)

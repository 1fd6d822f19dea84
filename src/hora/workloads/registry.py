"""The workloads there are. Imports no framework and no workload until one is chosen."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

__all__ = ["WORKLOADS", "Workload", "default_workers"]

SMALLEST_MICRO_BATCH = 64
"""Below this a worker on a CPU spends more of its time on overheads than another worker saves."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model that is trained to a target.

    Attributes:
        name: as in ``hora train NAME``, and its package in ``hora.workloads``.
        title: what is trained, in a line.
        data: the data it needs, in a line.
    """

    name: str
    title: str
    data: str

    @property
    def module(self) -> str:
        """What every worker runs."""
        return f"hora.workloads.{self.name}.train"

    def options(self) -> ModuleType:
        """Its module ``options``: ``add``, ``profile``, ``check`` and ``words``."""
        return importlib.import_module(f"hora.workloads.{self.name}.options")

    def targets(self) -> dict[str, float]:
        """The target of each profile."""
        config = importlib.import_module(f"hora.workloads.{self.name}.config")
        return {name: profile.target for name, profile in config.PROFILES.items()}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="resnet",
            title="ResNet v1.5 classifies images",
            data="Fashion-MNIST (a subset is included), or a folder tree like ImageNet's",
        ),
    )
}


def default_workers(cores: int, global_batch: int) -> int:
    """As many workers as there are cores, as long as each has a micro-batch worth its while."""
    most = max(1, min(cores, global_batch // SMALLEST_MICRO_BATCH))
    return next(workers for workers in range(most, 0, -1) if global_batch % workers == 0)

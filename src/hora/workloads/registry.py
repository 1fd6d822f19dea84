"""The workloads there are. Imports no framework and no workload until one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

__all__ = ["WORKLOADS", "Workload", "default_workers"]

EXTRAS = (("torch", "PyTorch"), ("mlperf_logging", "mlperf-logging"), ("PIL", "Pillow"))
"""Modules that every workload needs, and the packages they come in."""
PICTURES = (("pycocotools", "pycocotools"), ("skimage", "scikit-image"))
"""What finding objects needs beside: COCO's scoring, and the photos of the scenes."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model that is trained to a target.

    Attributes:
        name: as in ``hora train NAME``, and its package in ``hora.workloads``.
        title: what is trained, in a line.
        data: the data it needs, in a line.
        measures: what its targets are measured in, by the kind of target.
        smallest_micro_batch: below this a worker on a CPU spends more of its time on overheads than another
            worker saves.
        extras: modules it needs, and the packages they come in.
    """

    name: str
    title: str
    data: str
    measures: Mapping[str, str]
    smallest_micro_batch: int
    extras: Sequence[tuple[str, str]] = EXTRAS

    @property
    def module(self) -> str:
        """What every worker runs."""
        return f"hora.workloads.{self.name}.train"

    def options(self) -> ModuleType:
        """Its module ``options``: ``add``, ``profile``, ``check`` and ``words``."""
        return importlib.import_module(f"hora.workloads.{self.name}.options")

    def targets(self) -> dict[str, Mapping[str, float]]:
        """The targets of each profile, by kind; one and the same evaluation has to reach all of them."""
        config = importlib.import_module(f"hora.workloads.{self.name}.config")
        return {name: profile.targets for name, profile in config.PROFILES.items()}


BOXES = "box AP"
MASKS = "mask AP"

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="resnet",
            title="ResNet v1.5 classifies images",
            data="Fashion-MNIST (a subset is included), or a folder tree like ImageNet's",
            measures={"accuracy": "top-1 accuracy"},
            smallest_micro_batch=64,
        ),
        Workload(
            name="ssd",
            title="SSD finds objects, each with a class and a box",
            data="Scenes made of real photos, or COCO 2017",
            measures={"bbox": BOXES},
            smallest_micro_batch=8,
            extras=(*EXTRAS, *PICTURES),
        ),
        Workload(
            name="maskrcnn",
            title="Mask R-CNN finds objects, each with a class, a box and its pixels",
            data="Scenes made of real photos, or COCO 2017",
            measures={"bbox": BOXES, "segm": MASKS},
            smallest_micro_batch=8,
            extras=(*EXTRAS, *PICTURES),
        ),
    )
}


def default_workers(cores: int, global_batch: int, *, smallest_micro_batch: int) -> int:
    """As many workers as there are cores, as long as each has a micro-batch worth its while."""
    most = max(1, min(cores, global_batch // smallest_micro_batch))
    return next(workers for workers in range(most, 0, -1) if global_batch % workers == 0)

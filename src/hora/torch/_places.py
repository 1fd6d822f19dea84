"""Where a worker computes."""

from __future__ import annotations

import os

import torch

from hora.core.errors import SettingError, WorldError
from hora.core.plural import plural
from hora.core.settings import Settings
from hora.core.world import World

__all__ = ["device_of"]


def device_of(world: World, settings: Settings) -> torch.device:
    """Where this worker computes.

    Raises:
        SettingError: ``HORA_DEVICE=cuda`` on a host without a GPU.
        WorldError: more workers than GPUs.
    """
    if settings.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if settings.device == "cuda":
            raise SettingError(
                "HORA_DEVICE=cuda, but PyTorch finds no GPU here.",
                fix="Set HORA_DEVICE=cpu, or install a CUDA build of PyTorch on a host with a GPU.",
            )
        return torch.device("cpu")
    if count >= world.local_size:
        index = world.local_rank
    elif count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        index = 0  # Slurm and others show each worker its own GPU only
    else:
        raise WorldError(
            f"There are {world.local_size} workers on this host, but {count} {plural(count, 'GPU')}.",
            fix=f"Start {count} {plural(count, 'worker')} here, or set HORA_DEVICE=cpu.",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

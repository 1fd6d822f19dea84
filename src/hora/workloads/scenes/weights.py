"""Weights of a backbone that was trained on ImageNet, which the references of both detectors start from."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from hora.core.errors import DataError

__all__ = ["load_backbone"]

LEFT_OUT = ("fc.", "classifier.")
"""Entries of the file that no detector has."""


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Copy the weights of a classifying ResNet into the backbone of a detector, in place.

    The file is a state dict as torchvision names it (``conv1.weight``, ``bn1.running_mean``,
    ``layer1.0.conv1.weight`` ...), saved by ``torch.save``. Names differ here, the order does not: each entry
    has to have the shape of its counterpart. Stages that the backbone does not have are left out.

    Args:
        backbone: of SSD or of Mask R-CNN.
        path: the file. It is read without running any code that it may hold.

    Raises:
        DataError: the file is missing, is no state dict, or belongs to another network.
    """
    again = "Give a state dict of torchvision's ResNet with --backbone PATH."
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", fix=again) from error
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"{path} is no file of weights: {first}.", fix=again) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path} holds no state dict.", fix=again)
    given = [
        (str(name), value)
        for name, value in content.items()
        if not str(name).startswith(LEFT_OUT) and not str(name).endswith("num_batches_tracked")
    ]
    own = [(name, value) for name, value in backbone.state_dict().items() if "num_batches" not in name]
    if len(given) < len(own):
        raise DataError(f"{path} has {len(given)} entries, but the backbone needs {len(own)}.", fix=again)
    for (name, mine), (theirs, value) in zip(own, given, strict=False):
        if mine.shape != value.shape:
            raise DataError(
                f"{path}: {theirs} has the shape {tuple(value.shape)}, but {name} needs {tuple(mine.shape)}.",
                fix=again,
            )
    with torch.no_grad():
        for (_, mine), (_, value) in zip(own, given, strict=False):
            mine.copy_(value)

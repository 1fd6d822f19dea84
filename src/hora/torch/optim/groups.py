"""Parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["decay_groups"]


def decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weights with ``weight_decay``, normalizations and biases without.

    Decaying a scale or a bias pulls the function towards zero instead of towards simpler weights (T. He et
    al., "Bag of Tricks for Image Classification", arXiv:1812.01187, section 3.1). What has at most one
    dimension is one of these. The second group also has ``trust=False`` for :class:`LARS`.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": weights, "weight_decay": weight_decay, "trust": True},
        {"params": others, "weight_decay": 0.0, "trust": False},
    ]
    return [group for group in groups if group["params"]]

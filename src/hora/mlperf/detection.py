"""The hyperparameters that rule set 0.7.0 asks of SSD and of Mask R-CNN, by their MLPerf keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["maskrcnn_hyperparameters", "ssd_hyperparameters"]


def ssd_hyperparameters(
    *,
    global_batch: int,
    lr: float,
    weight_decay: float,
    warmup_steps: int,
    decay_epochs: Sequence[float],
    bn_span: int,
) -> Mapping[str, Any]:
    """Those of SSD. A warm-up from nothing has the factor 0, and one crop is tried per picture.

    Args:
        global_batch: pictures per step.
        lr: peak learning rate.
        weight_decay: of the weights.
        warmup_steps: length of the linear warm-up.
        decay_epochs: after which the rate is decayed.
        bn_span: pictures over which a batch normalization takes its statistics: the micro-batch.
    """
    return {
        "global_batch_size": global_batch,
        "opt_base_learning_rate": lr,
        "opt_weight_decay": weight_decay,
        "opt_learning_rate_warmup_steps": warmup_steps,
        "opt_learning_rate_warmup_factor": 0,
        "opt_learning_rate_decay_boundary_epochs": list(decay_epochs),
        "max_samples": 1,
        "model_bn_span": bn_span,
    }


def maskrcnn_hyperparameters(
    *,
    global_batch: int,
    lr: float,
    warmup_steps: int,
    decay_factor: float,
    decay_steps: Sequence[int],
    candidates: int,
    image_sizes: tuple[int, int],
) -> Mapping[str, Any]:
    """Those of Mask R-CNN. The warm-up factor is the part of the peak rate that the first step has.

    Args:
        global_batch: pictures per step.
        lr: peak learning rate.
        warmup_steps: length of the linear warm-up.
        decay_factor: what is left of the rate at each decay.
        decay_steps: after which the rate is decayed.
        candidates: proposals of a picture in training.
        image_sizes: short and long side in pixels that pictures are scaled to.
    """
    return {
        "global_batch_size": global_batch,
        "opt_base_learning_rate": lr,
        "opt_learning_rate_warmup_steps": warmup_steps,
        "opt_learning_rate_warmup_factor": 1 / max(1, warmup_steps),
        "opt_learning_rate_decay_factor": decay_factor,
        "opt_learning_rate_decay_steps": list(decay_steps),
        "num_image_candidates": candidates,
        "min_image_size": image_sizes[0],
        "max_image_size": image_sizes[1],
    }

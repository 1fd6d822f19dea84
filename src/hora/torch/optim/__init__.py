"""Optimizers, schedules and parameter groups for large global batches."""

from __future__ import annotations

from hora.torch.optim.average import ParameterAverage, ema_rule
from hora.torch.optim.groups import decay_groups
from hora.torch.optim.lamb import LAMB
from hora.torch.optim.lars import LARS
from hora.torch.optim.local import PostLocalSGD
from hora.torch.optim.noise import GradientNoise, noise_of
from hora.torch.optim.novograd import NovoGrad
from hora.torch.optim.schedule import cosine, linear_rule, polynomial, set_lr, sqrt_rule, step_decay

__all__ = [
    "LAMB",
    "LARS",
    "GradientNoise",
    "NovoGrad",
    "ParameterAverage",
    "PostLocalSGD",
    "cosine",
    "decay_groups",
    "ema_rule",
    "linear_rule",
    "noise_of",
    "polynomial",
    "set_lr",
    "sqrt_rule",
    "step_decay",
]

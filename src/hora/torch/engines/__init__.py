"""Engines of our own: shared memory between the ranks of one host.

Importing this registers the backend "hora" with ``torch.distributed``.
"""

from __future__ import annotations

import torch.distributed as dist

from hora.torch.engines._algorithms import LARGE
from hora.torch.engines._create import Insist, create
from hora.torch.engines._group import Group

__all__ = ["LARGE", "Group", "Insist", "create"]

if "HORA" not in dist.Backend._plugins:
    dist.Backend.register_backend("hora", create, extended_api=True, devices=["cpu"])

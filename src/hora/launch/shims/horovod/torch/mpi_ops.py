"""``horovod.torch.mpi_ops``: the operations and queries."""

from __future__ import annotations

from hora.torch.horovod import *  # noqa: F403
from hora.torch.horovod import __all__ as _names
from hora.torch.horovod._backwards import handle_average_backwards_compatibility, num_rank_is_power_2

__all__ = [*_names, "handle_average_backwards_compatibility", "num_rank_is_power_2"]  # noqa: PLE0604

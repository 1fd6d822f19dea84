"""Where the flat buffers come from that travel whole."""

from __future__ import annotations

import torch

__all__ = ["flat_buffer"]


def flat_buffer(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of zeros that is given to the engine as it is: gradients on their way, and parameters.

    All such memory of sharded optimizers is made here, so that an engine can lend its own.
    """
    return torch.zeros(length, dtype=dtype, device=device)

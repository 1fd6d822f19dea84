"""Starts the recording of a script that uses PyTorch, when that is imported."""

from __future__ import annotations

from hora.adapter.recording.recorder import recorder
from hora.torch.verify._record import Recorder

__all__ = ["start"]


def start() -> None:
    """Look on from here on; called once, in a rank of ``hora verify``."""
    neutral = recorder()
    Recorder(neutral.plan, rank=neutral.rank, size=neutral.size).start()

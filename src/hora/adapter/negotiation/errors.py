"""The exceptions of Horovod's interface, under its names."""

from __future__ import annotations

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
]


class HorovodInternalError(RuntimeError):
    """A collective cannot be completed: the ranks ask for different things, or a rank is gone.

    Attributes:
        echo: whether the cause is that another rank has ended, which the launcher then reports first.
    """

    echo = False


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Attributes:
        skip_sync: whether the state needs no synchronization, since workers were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of the framework. Hora is not built for one: never raised."""

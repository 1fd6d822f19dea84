"""``horovod.data``: loaders of data that a thread fills ahead."""

from __future__ import annotations

from .data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

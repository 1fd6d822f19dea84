"""``horovod.data.data_loader_base``."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_END = object()


class BaseDataLoader:
    """What loaders of batches have in common: a subclass defines ``__len__`` and ``_iterate``."""

    def __len__(self) -> int:
        """Number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches, in their order."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Changes a batch just before it is given out."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Batches of one pass over the data."""
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Put in front of a loader, ``class Loader(AsyncDataLoaderMixin, MyLoader)``: a thread reads ahead.

    Args:
        async_loader_queue_size: batches read ahead; 0: no thread.
        args: the loader's own.
        kwargs: the loader's own.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self._passes: list[_Pass] = []

    def __iter__(self) -> Iterator[Any]:
        """Batches of one pass over the data; what the loader raises is raised here."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        current = _Pass(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._passes.append(current)
        try:
            for batch in current:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            current.close()
            self._passes.remove(current)

    def close_async_loader(self) -> None:
        """End the threads of passes that were not read to their end."""
        for current in list(self._passes):
            current.close()


class _Pass:
    """One pass over the data, read by a thread of its own."""

    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._batches = batches
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="horovod-async-loader", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for batch in self._batches:
                self._queue.put(batch)
                if self._closed.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self._error = error
        self._queue.put(_END)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._queue.get()) is not _END:
            yield batch
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, which may wait for room in the queue."""
        self._closed.set()
        self._drain()  # the thread puts one thing more at most, for which there is room now
        self._thread.join()
        self._drain()
        self._queue.put(_END)  # whoever still reads hears of it

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

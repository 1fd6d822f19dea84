"""The one context of an adapter in this process, and the questions about the job that it answers."""

from __future__ import annotations

import importlib
from typing import Generic, NoReturn, Protocol, TypeVar

from hora.core.errors import AlreadyInitializedError, NotInitializedError
from hora.core.world import World

__all__ = ["Current", "Known", "in_use", "were_used"]


class Known(Protocol):
    """What every adapter's context knows.

    Attributes:
        where: ``file:line`` of the call of ``init``.
    """

    where: str

    @property
    def world(self) -> World:
        """This worker's place in the job."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks with this worker's local rank, one per host."""

    @property
    def homogeneous(self) -> bool:
        """Whether every host has the same number of workers."""


C = TypeVar("C", bound=Known)

_all: dict[str, Current[Known]] = {}


class Current(Generic[C]):
    """Holds an adapter's context between ``init()`` and ``shutdown()``.

    Its methods are public functions of the adapter: ``rank = current.rank``.

    Args:
        module: the adapter, for messages: ``hora.torch``.

    Attributes:
        context: None before ``init()`` and after ``shutdown()``.
        generation: how often ``init()`` has made one in this process; keeps what belongs to each apart.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.context: C | None = None
        self.generation = 0
        _all[module] = self  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _found, (self.module,)  # `rank` may be what another process is to call

    def required(self, function: str) -> C:
        """The context, for ``function``, which is named in the error when there is none.

        Raises:
            NotInitializedError: before ``init()`` or after ``shutdown()``.
        """
        if self.context is None:
            self._refuse(function)
        return self.context

    def refuse_second(self) -> None:
        """Raises AlreadyInitializedError if there is a context."""
        if self.context is not None:
            raise AlreadyInitializedError(
                f"{self.module}.init() was called before, at {self.context.where}.",
                fix=f"Call it once at the start of the script, or {self.module}.shutdown() before the next.",
            )

    def is_initialized(self) -> bool:
        """Whether ``init()`` was called and ``shutdown()`` was not."""
        return self.context is not None

    def rank(self) -> int:
        """This worker's rank: 0 to ``size() - 1``, unique in the job."""
        return self.required("rank").world.rank

    def size(self) -> int:
        """Number of workers in the job."""
        return self.required("size").world.size

    def local_rank(self) -> int:
        """This worker's rank on its host: 0 to ``local_size() - 1``."""
        return self.required("local_rank").world.local_rank

    def local_size(self) -> int:
        """Number of workers on this worker's host."""
        return self.required("local_size").world.local_size

    def cross_rank(self) -> int:
        """This worker's rank among the workers that have the same local rank on other hosts."""
        context = self.required("cross_rank")
        return context.peers.index(context.world.rank)

    def cross_size(self) -> int:
        """Number of hosts that have a worker of this local rank."""
        return len(self.required("cross_size").peers)

    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of workers."""
        return self.required("is_homogeneous").homogeneous

    def _refuse(self, function: str) -> NoReturn:
        raise NotInitializedError(
            f"{self.module}.{function}() was called before {self.module}.init().",
            fix=f"Call {self.module}.init() once, at the start of the script.",
        )


def in_use() -> list[str]:
    """The adapters of this process that are between their ``init()`` and ``shutdown()``."""
    return [module for module, current in _all.items() if current.context is not None]


def were_used() -> bool:
    """Whether any adapter's ``init()`` was called in this process."""
    return any(current.generation or current.context is not None for current in _all.values())


def _found(module: str) -> Current[Known]:
    importlib.import_module(module)
    return _all[module]

"""Who this worker is, with an error in Horovod's words before ``init()``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from hora.core.errors import NotInitializedError
from hora.torch import _context
from hora.torch.horovod._session import session

__all__ = ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]


def _in_horovods_words(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def wrapped() -> int:
        try:
            return function()
        except NotInitializedError:
            session(function.__name__)
            raise

    return wrapped


rank = _in_horovods_words(_context.rank)
size = _in_horovods_words(_context.size)
local_rank = _in_horovods_words(_context.local_rank)
local_size = _in_horovods_words(_context.local_size)
cross_rank = _in_horovods_words(_context.cross_rank)
cross_size = _in_horovods_words(_context.cross_size)

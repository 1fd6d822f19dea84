"""``horovod.common.process_sets``."""

from __future__ import annotations

from hora.torch.horovod import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_included,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_included",
    "remove_process_set",
]

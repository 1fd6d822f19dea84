"""``horovod.common.process_sets``."""

from __future__ import annotations

from ._face import face

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_included",
    "remove_process_set",
]

_hvd = face()
ProcessSet, global_process_set = _hvd.ProcessSet, _hvd.global_process_set
add_process_set, remove_process_set = _hvd.add_process_set, _hvd.remove_process_set
process_set_included = _hvd.process_set_included
get_process_set_ids_and_ranks = _hvd.get_process_set_ids_and_ranks

"""The processes that a rank has started, such as loader workers, as ``/proc`` shows them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Child", "stopped"]

LOADER = "pt_data_worker"
"""What torch names the processes of its data loader."""


class Child(NamedTuple):
    """A process that a rank has started, itself or through another.

    Attributes:
        pid: its number.
        name: of its program, or as it calls itself.
        state: one letter, see proc_pid_stat(5).
        parent: the number of the process that started it.
    """

    pid: int
    name: str
    state: str
    parent: int

    def __str__(self) -> str:
        kind = "loader worker" if self.name == LOADER else f"process {self.name}"
        return f"{kind} (pid {self.pid})"


def stopped(rank: int, proc: Path = Path("/proc")) -> list[Child]:
    """Those that a signal or a debugger has stopped; none where there is no ``/proc``.

    Args:
        rank: the process of the rank.
        proc: where to look.
    """
    found = {child.pid: child for path in proc.glob("[0-9]*/stat") if (child := _read(path)) is not None}
    return [child for child in found.values() if child.state in "Tt" and _descends(child, rank, found)]


def _read(path: Path) -> Child | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return None
    # The name stands in parentheses, and may hold some itself.
    head, _, rest = text.rpartition(")")
    number, _, name = head.partition(" (")
    state, parent = rest.split()[:2]
    return Child(int(number), name, state, int(parent))


def _descends(child: Child, rank: int, known: dict[int, Child]) -> bool:
    seen = {child.pid}
    parent = child.parent
    while parent != rank:
        if parent not in known or parent in seen:
            return False
        seen.add(parent)
        parent = known[parent].parent
    return True

"""Whether the kernel's out-of-memory killer ran during the job.

A rank that it kills ends by a bare SIGKILL. The kernel counts what it does: for the whole host in
``/proc/vmstat``, and for each memory cgroup in ``memory.oom_control`` (v1) or ``memory.events`` (v2).
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["MemoryWatch"]

VMSTAT = Path("/proc/vmstat")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class MemoryWatch:
    """Remembers the counters at the job's start.

    Args:
        vmstat: the host's counters.
        own_cgroup: list of this launcher's cgroups; its ranks are in the same ones.
        cgroups: where the cgroup file systems are mounted.
    """

    def __init__(
        self, vmstat: Path = VMSTAT, *, own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS
    ) -> None:
        self._sources = [
            (path, f"the memory limit of this container or cgroup, {limit}")
            for path, limit in _cgroup_counters(own_cgroup, cgroups)
        ]
        self._sources.append((vmstat, "the host ran out of memory"))
        self._before = [_count(path) for path, _ in self._sources]

    def rose(self) -> str | None:
        """Why the out-of-memory killer ran since the start; None when it did not, or nobody can tell."""
        for (path, reason), before in zip(self._sources, self._before, strict=True):
            now = _count(path)
            if now is not None and before is not None and now > before:
                return reason
        return None


def _count(path: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _cgroup_counters(own: Path, mount: Path) -> list[tuple[Path, str]]:
    """Counter files of this launcher's memory cgroup, each with its limit in words."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = path.lstrip("/")
        if "memory" in controllers.split(","):
            folder, counter, limit = mount / "memory" / inner, "memory.oom_control", "memory.limit_in_bytes"
        elif number == "0":
            folder, counter, limit = mount / inner, "memory.events", "memory.max"
        else:
            continue
        # In a container the path is often the host's, while the mount has the own group at its top.
        for candidate in (folder, mount / "memory" if "memory" in controllers else mount):
            if (candidate / counter).is_file():
                found.append((candidate / counter, _limit(candidate / limit)))
                break
    return found


def _limit(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError:
        return "was reached"
    return (
        f"{int(text) / 2**20:.0f} MiB, was reached" if text.isdigit() and int(text) < 2**60 else "was reached"
    )

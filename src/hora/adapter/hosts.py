"""Which ranks share a host: told by the launcher, or found out when they meet."""

from __future__ import annotations

import collections
import hashlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hora.core.world import World

__all__ = ["grouped", "host_number"]


def host_number(world: World) -> int:
    """A number that is equal for the ranks of one host: 63 bits at most."""
    if world.host_index >= 0:
        return world.host_index
    name = f"{socket.gethostname()} {_boot_id()}"  # the launcher did not say
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def grouped(world: World, places: Sequence[tuple[int, int]]) -> tuple[World, tuple[int, ...], bool]:
    """What the places of all ranks tell.

    Args:
        world: this worker's.
        places: by rank: the :func:`host_number`, and the local rank.

    Returns:
        The world, hosts filled in where the launcher did not tell them; the ranks that have this worker's
        local rank, by host; and whether every host has the same number of workers.
    """
    peers = tuple(rank for rank, place in enumerate(places) if place[1] == world.local_rank)
    if world.host_index < 0:
        hosts = list(dict.fromkeys(host for host, _ in places))
        world = replace(world, host_index=hosts.index(host_number(world)), host_count=len(hosts))
    workers = collections.Counter(host for host, _ in places)
    return world, peers, len(set(workers.values())) == 1


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

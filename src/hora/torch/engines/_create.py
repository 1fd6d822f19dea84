"""Makes a group of the backend "hora": finds out which ranks share a host, and gives them memory."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hora.torch.engines import _futex
from hora.torch.engines._group import Group
from hora.torch.engines._hosts import LEADER, HostsGroup
from hora.torch.engines._memory import Segment
from hora.torch.engines._team import Team

__all__ = ["create"]

_TEXT = 256
"""Bytes of the texts that ranks exchange."""

_log = logging.getLogger(__name__)


def create(options: Any, _: Any = None) -> Any:
    """A group on shared memory, or Gloo's where its ranks cannot share any.

    Args:
        options: torch's own: store, rank, size and timeout.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    members = list(options.global_ranks_in_group) or list(range(size))
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", options.store), rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    names = _gather(gloo, _host())
    hosts = [[rank for rank in range(size) if names[rank] == name] for name in dict.fromkeys(names)]
    if len(hosts) == size > 1:
        return gloo  # one rank on each host
    team = _share(gloo, next(host for host in hosts if rank in host), members, timeout)
    if team is None:
        return gloo
    cores = len(os.sched_getaffinity(0))
    idle = cores >= team.size * (torch.get_num_threads() + 1)
    if len(hosts) == 1:
        return Group(gloo, team, idle_cores=idle)
    leaders = None
    if team.index == LEADER:
        store = PrefixStore("leaders", options.store)
        place = next(place for place, host in enumerate(hosts) if rank in host)
        leaders = dist.ProcessGroupGloo(store, place, len(hosts), timeout=timeout)
    return HostsGroup(gloo, team, idle_cores=idle, hosts=hosts, leaders=leaders)


def _share(
    gloo: Any, host: Sequence[int], members: Sequence[int], timeout: datetime.timedelta
) -> Team | None:
    """This rank among those of its host; None if some ranks of the group cannot share memory."""
    rank, size = gloo.rank(), len(host)
    segment, where, problem = None, "", ""
    if rank == host[LEADER]:
        try:
            segment, where = Segment.create(Team.size_of(size))
        except OSError as error:
            problem = str(error)
    where = _gather(gloo, where)[host[LEADER]]
    if rank != host[LEADER] and where:
        try:
            segment = Segment.open(where)
        except OSError as error:
            problem = str(error)
    team = None
    if segment is not None:
        team = Team(
            segment,
            index=host.index(rank),
            members=[members[each] for each in host],
            cores=len(os.sched_getaffinity(0)),
            timeout=timeout.total_seconds(),
        )
    problems = [text for text in _gather(gloo, problem) if text]
    if segment is not None:
        segment.seal()
    if team is None or problems:
        _log.warning("The ranks cannot share memory, so Gloo carries their data: %s", problems[:1])
        return None
    team.watch()
    return team


def _host() -> str:
    """The same text on all ranks that can share memory, and talk to each other without a network."""
    if not _futex.AVAILABLE:
        return f"{os.uname().nodename} {os.getpid()}"
    parts = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "net")]
    parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _gather(gloo: Any, text: str) -> list[str]:
    """Every rank's text."""
    mine = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
    line = text.encode()[:_TEXT]
    if line:
        mine[: len(line)] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    everyone = [torch.zeros_like(mine) for _ in range(gloo.size())]
    gloo.allgather([everyone], [mine]).wait()
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in everyone]

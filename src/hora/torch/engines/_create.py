"""Makes a group of the backend "hora": finds out which ranks share a host, and gives them memory.

Ranks that cannot share memory must all find that out, also where only one of them has a problem. So each
step ends with an exchange of what went wrong, and whoever has failed takes part in it.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hora.core import futex
from hora.core.errors import WorldError
from hora.core.settings import load
from hora.torch.engines._group import Group
from hora.torch.engines._hosts import LEADER, HostsGroup
from hora.torch.engines._memory import Segment
from hora.torch.engines._team import Team

__all__ = ["Insist", "create"]

_TEXT = 256
"""Bytes of the texts that ranks exchange."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Insist:
    """Given as ``pg_options``: ranks that cannot share memory raise, where otherwise they would use Gloo."""


def create(options: Any, insist: Any = None) -> Any:
    """A group on shared memory, or Gloo's where its ranks cannot share any.

    Args:
        options: torch's own: store, rank, size and timeout.
        insist: :class:`Insist`, or something else that other backends know.

    Raises:
        SettingError: a ``HORA_*`` variable that is none.
        WorldError: the caller insists, and memory cannot be shared.
    """
    stall_after = load().stall_warning
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    members = list(options.global_ranks_in_group) or list(range(size))
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", options.store), rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    names = [name.split() for name in _gather(gloo, _host())]
    hosts = [[each for each in range(size) if names[each] == name] for name in _unique(names)]
    if len(hosts) == size > 1:
        machines = len(_unique(machine for machine, _ in names))
        if insist or machines < size:
            reason = (
                "no two of them run on one host"
                if machines == size
                else "those of one host cannot reach each other's memory (containers of their own, or a "
                "system whose futexes are not known)"
            )
            _fall_back(rank, insist, reason)
        return gloo
    team = _share(gloo, next(host for host in hosts if rank in host), members, timeout, insist)
    if team is None:
        return gloo
    cores = len(os.sched_getaffinity(0))
    idle = cores >= team.size * (torch.get_num_threads() + 1)
    if len(hosts) == 1:
        return Group(gloo, team, idle_cores=idle, stall_after=stall_after)
    leaders = None
    if team.index == LEADER:
        store = PrefixStore("leaders", options.store)
        place = next(place for place, host in enumerate(hosts) if rank in host)
        leaders = dist.ProcessGroupGloo(store, place, len(hosts), timeout=timeout)
    return HostsGroup(
        gloo, team, idle_cores=idle, stall_after=stall_after, hosts=hosts, members=members, leaders=leaders
    )


def _share(
    gloo: Any, host: Sequence[int], members: Sequence[int], timeout: datetime.timedelta, insist: Any
) -> Team | None:
    """This rank among those of its host; None if some ranks of the group cannot share memory."""
    rank, size = gloo.rank(), len(host)
    segment, team, where, problem = None, None, "", ""
    if rank == host[LEADER]:
        try:
            if size > futex.MOST:
                raise OSError(f"{size} ranks on one host are more than {futex.MOST}")
            segment, where = Segment.create(Team.size_of(size))
        except (OSError, ValueError) as error:
            problem = f"{error} on rank {members[rank]}"
    where = _gather(gloo, where)[host[LEADER]]
    try:
        if segment is None and where:
            segment = Segment.open(where)
        if segment is not None:
            team = Team(
                segment,
                index=host.index(rank),
                members=[members[each] for each in host],
                cores=len(os.sched_getaffinity(0)),
                timeout=timeout.total_seconds(),
            )
    except (OSError, ValueError) as error:
        problem = f"{error} on rank {members[rank]}"
    problems = _gather(gloo, problem)
    if segment is not None:
        segment.seal()
    if not any(problems):  # all have made their teams, so that each can watch the others
        try:
            assert team is not None
            team.watch()
        except OSError as error:
            problem = f"{error} on rank {members[rank]}"
        problems = _gather(gloo, problem)
    if any(problems):
        if team is not None:
            team.close()
        _fall_back(rank, insist, next(filter(None, problems)))
        return None
    return team


def _fall_back(rank: int, insist: Any, reason: str) -> None:
    """Say why Gloo carries the data: once, since all ranks come here together."""
    if isinstance(insist, Insist):
        raise WorldError(
            f"HORA_ENGINE=shared-memory, but the ranks cannot share memory: {reason}.",
            fix="Unset HORA_ENGINE, so that Gloo carries what cannot be shared.",
        )
    if rank == 0:
        _log.warning("The ranks cannot share memory, so Gloo carries their data, more slowly: %s.", reason)


def _host() -> str:
    """The machine, and the same second word on all ranks that can share memory and talk without a network."""
    machine = os.uname().nodename.encode()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        places = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "net")]
    except OSError:  # a system of another kind, or one that hides them
        places = [f"alone {os.getpid()}"]
    if not futex.AVAILABLE:
        places.append(f"alone {os.getpid()}")
    both = (machine, machine + " ".join(places).encode())
    return " ".join(hashlib.blake2b(part, digest_size=16).hexdigest() for part in both)


def _unique(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _gather(gloo: Any, text: str) -> list[str]:
    """Every rank's text."""
    mine = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
    line = text.encode()[:_TEXT]
    if line:
        mine[: len(line)] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    everyone = [torch.zeros_like(mine) for _ in range(gloo.size())]
    gloo.allgather([everyone], [mine]).wait()
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in everyone]

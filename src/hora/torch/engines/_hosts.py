"""A process group over several hosts: shared memory inside each, Gloo between one leader of each.

What is reduced, broadcast or gathered crosses the network once per host, and not once per rank. What one
rank has for one other (``all_to_all``) crosses it once in any case, so there a leader would only be in the
way: ranks of one host exchange theirs through memory, those of different hosts directly.
"""

# As in _group.py: torch declares each method with its C++ overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hora.torch.engines import _algorithms as algorithms
from hora.torch.engines._algorithms import Call, Steps
from hora.torch.engines._group import Group
from hora.torch.engines._kernels import divide, reduce_into
from hora.torch.engines._queue import Queue
from hora.torch.engines._team import SLICE, Team
from hora.torch.engines._vectors import Flats, parts_of

__all__ = ["HostsGroup"]

LEADER = 0
"""A leader's number among the ranks of its host."""

Tensors = Sequence[torch.Tensor]


class HostsGroup(Group):
    """A process group whose ranks are on several hosts.

    Args:
        gloo: a Gloo group of all ranks.
        team: the ranks of this host.
        idle_cores: whether the host has cores on which nothing computes.
        stall_after: as for a group.
        hosts: the ranks of each host, by their number in this group.
        members: what the group's ranks are called in messages.
        leaders: a Gloo group of the first ranks of all hosts; None on other ranks.
    """

    def __init__(
        self,
        gloo: Any,
        team: Team,
        *,
        idle_cores: bool,
        stall_after: float,
        hosts: Sequence[Sequence[int]],
        members: Sequence[int],
        leaders: Any,
    ) -> None:
        self._leaders = leaders
        self._places = {
            rank: (host, index) for host, ranks in enumerate(hosts) for index, rank in enumerate(ranks)
        }
        self._hosts = [list(ranks) for ranks in hosts]
        self._host = self._places[gloo.rank()][0]
        away = [each for number, each in enumerate(self._hosts) if number != self._host]
        self._others = [members[rank] for ranks in away for rank in ranks]
        super().__init__(gloo, team, idle_cores=idle_cores, stall_after=stall_after)

    def _queue(self, *, idle_cores: bool, stall_after: float) -> Queue:
        return Queue(self.team, idle_cores=True, stall_after=stall_after, alone=True)

    def empty(
        self, count: int, dtype: torch.dtype, *, wait: Callable[[Any], None] = lambda work: None
    ) -> torch.Tensor:
        """A vector of this rank: what crosses the network is copied anyway."""
        return torch.zeros(count, dtype=dtype, device="cpu")

    # --- through the leaders --------------------------------------------------------------------

    def _reduce_everywhere(self, call: Call, flat: torch.Tensor, op: Any) -> Steps:
        yield from self._reduce_between(call, flat, op)
        yield from algorithms.broadcast(self.team, call, flat, LEADER)

    def _reduce_to(self, call: Call, flat: torch.Tensor, root: int, op: Any) -> Steps:
        host, index = self._places[root]
        # The leader adds up, but the result is the root's alone.
        total = flat.clone() if self._leaders is not None and root != self.rank() else flat
        yield from self._reduce_between(call, total, op)
        if host == self._host and index != LEADER:
            yield from algorithms.broadcast(self.team, call, total, LEADER, to=index)

    def _reduce_between(self, call: Call, flat: torch.Tensor, op: Any) -> Steps:
        """The leaders' ``flat`` becomes the reduction of all ranks'."""
        average = op == dist.ReduceOp.AVG
        kind = dist.ReduceOp.SUM if average else op
        yield from algorithms.reduce(self.team, call, flat, LEADER, kind)
        if self._leaders is not None and flat.numel():
            wire, kind = _on_the_wire(flat, kind)
            options = dist.AllreduceOptions()
            options.reduceOp = kind
            self._await(self._leaders.allreduce, [wire], options=options)
            _off_the_wire(flat, wire, kind)
            if average:
                divide(flat, self.size())

    def _reduce_parts(self, call: Call, flat: torch.Tensor, parts: Tensors, op: Any) -> Steps:
        """Each leader gets the sums that the other hosts have for its own host, and adds them up."""
        average = op == dist.ReduceOp.AVG
        kind = dist.ReduceOp.SUM if average else op
        whole = _joined([parts[rank] for ranks in self._hosts for rank in ranks])
        yield from algorithms.reduce(self.team, call, whole, LEADER, kind)
        total = None
        if self._leaders is not None:
            count = flat.numel()
            sums = self._swap(
                list(torch.split(whole, [count * len(ranks) for ranks in self._hosts])),
                [count * self.team.size] * len(self._hosts),
            )
            reduce_into(sums[0], sums, kind)
            if average:
                divide(sums[0], self.size())
            total = parts_of(sums[0], self.team.size)
        yield from algorithms.scatter(self.team, call, flat, total, LEADER)

    def _spread(self, call: Call, flat: torch.Tensor, root: int) -> Steps:
        host, index = self._places[root]
        if host == self._host:
            yield from algorithms.broadcast(self.team, call, flat, index)
        self._broadcast(flat, host)
        if host != self._host:
            yield from algorithms.broadcast(self.team, call, flat, LEADER)

    def _collect_everywhere(self, call: Call, flats: Tensors, flat: torch.Tensor) -> Steps:
        flat, flats = flat.view(torch.uint8), [each.view(torch.uint8) for each in flats]
        mine = [torch.empty_like(flat) for _ in self._hosts[self._host]]
        yield from algorithms.all_gather(self.team, call, mine, flat, self.buffers)
        for host, ranks in enumerate(self._hosts):
            own = host == self._host
            block = _joined(mine) if own else flat.new_empty(flat.numel() * len(ranks))
            self._broadcast(block, host)
            if not own:
                yield from algorithms.broadcast(self.team, call, block, LEADER)
            for rank, part in zip(ranks, parts_of(block, len(ranks)), strict=True):
                flats[rank].copy_(part)

    def _collect(self, call: Call, flats: Tensors | None, flat: torch.Tensor, root: int) -> Steps:
        host, index = self._places[root]
        target = index if host == self._host else LEADER
        flat = flat.view(torch.uint8)
        here = self._hosts[self._host]
        mine = [torch.empty_like(flat) for _ in here] if self.team.index == target else None
        yield from algorithms.gather(self.team, call, mine, flat, target)
        lengths = [len(ranks) * flat.numel() for ranks in self._hosts]
        blocks = [flat.new_empty(length) for length in lengths]
        if self._leaders is not None:
            away = host != self._host
            outgoing = [flat.new_empty(0) for _ in self._hosts]
            if away and mine is not None:
                outgoing[host] = _joined(mine)
            lengths[host] = 0
            blocks = self._swap(outgoing, [0] * len(lengths) if away else lengths)
        if host != self._host:
            return
        for number, (ranks, block) in enumerate(zip(self._hosts, blocks, strict=True)):
            if number == host:
                found: Sequence[torch.Tensor] = mine or []
            else:
                if index != LEADER:
                    yield from algorithms.broadcast(self.team, call, block, LEADER, to=index)
                found = parts_of(block, len(ranks))
            if flats is not None and root == self.rank():
                for rank, part in zip(ranks, found, strict=True):
                    flats[rank].view(torch.uint8).copy_(part)

    def _deal(self, call: Call, flat: torch.Tensor, parts: Tensors | None, root: int) -> Steps:
        host, index = self._places[root]
        flat = flat.view(torch.uint8)
        lengths = [len(ranks) * flat.numel() for ranks in self._hosts]
        lengths[host] = 0
        mine: Sequence[torch.Tensor] | None = None
        outgoing = flat.new_empty(sum(lengths))
        if parts is not None and root == self.rank():
            parts = [part.view(torch.uint8) for part in parts]
            mine = [parts[rank] for rank in self._hosts[host]]
            away = [ranks for number, ranks in enumerate(self._hosts) if number != host]
            outgoing = _joined([parts[rank] for ranks in away for rank in ranks])
        if host == self._host and index != LEADER:
            yield from algorithms.broadcast(self.team, call, outgoing, index, to=LEADER)
        if self._leaders is not None:
            received = [0] * len(lengths)
            if host != self._host:
                received[host], outgoing, lengths = lengths[self._host], flat.new_empty(0), [0] * len(lengths)
            blocks = self._swap(list(torch.split(outgoing, lengths)), received)
            if host != self._host:
                mine = parts_of(blocks[host], self.team.size)
        yield from algorithms.scatter(self.team, call, flat, mine, index if host == self._host else LEADER)

    def _meet(self, call: Call) -> Steps:
        yield from algorithms.barrier(self.team, call)
        if self._leaders is not None:
            self._await(self._leaders.barrier, options=dist.BarrierOptions())
        yield from algorithms.barrier(self.team, call)

    # --- directly -------------------------------------------------------------------------------

    def _exchange(self, call: Call, outputs: Tensors, sources: Tensors) -> Steps:
        """Gloo starts at once, so that all ranks have one order; what stays on the host moves meanwhile."""
        here = self._hosts[self._host]
        sent = [0 if rank in here else each.numel() for rank, each in enumerate(sources)]
        received = [0 if rank in here else each.nbytes for rank, each in enumerate(outputs)]
        away = _joined([each for rank, each in enumerate(sources) if rank not in here])
        wire = away.new_empty(sum(received))
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.team.timeout)
        work = self.gloo.alltoall_base(wire, away, received, sent, options)
        sources = [sources[rank] for rank in here]

        def steps() -> Steps:
            with Flats(outputs) as flats:
                targets = [flat.view(torch.uint8) for flat in flats]
                yield from algorithms.all_to_all(self.team, call, [targets[rank] for rank in here], sources)
                self._finish(work)
                for target, part, length in zip(targets, torch.split(wire, received), received, strict=True):
                    if length:
                        target.copy_(part)

        return steps()

    # --- among the leaders ----------------------------------------------------------------------

    def _broadcast(self, flat: torch.Tensor, host: int) -> None:
        """All leaders get what that of this host has."""
        if self._leaders is not None and flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = host, 0
            self._await(self._leaders.broadcast, [flat.view(torch.uint8)], options=options)

    def _swap(self, outgoing: Tensors, received: Sequence[int]) -> list[torch.Tensor]:
        """Send each leader its part; so many elements come from each."""
        width = outgoing[0].element_size()
        wire = _joined(outgoing).view(torch.uint8)
        result = wire.new_empty(sum(received) * width)
        self._await(
            self._leaders.alltoall_base,
            result,
            wire,
            [length * width for length in received],
            [part.nbytes for part in outgoing],
            options=dist.AllToAllOptions(),
        )
        return list(torch.split(result.view(outgoing[0].dtype), list(received)))

    def _await(self, start: Callable[..., Any], *arguments: Any, options: Any) -> None:
        options.timeout = timedelta(seconds=self.team.timeout)
        self._finish(start(*arguments, options))

    def _finish(self, work: Any) -> None:
        """Wait for other hosts."""
        with self.team.away():
            began = time.monotonic()
            while not _ended(work):
                self.team.check()
                if self.queue.observer is None:
                    self.queue.stalls.away(time.monotonic() - began, self._others)


def _joined(parts: Tensors) -> torch.Tensor:
    """One behind the other; torch joins few of its dtypes, but bytes are bytes."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _ended(work: Any) -> bool:
    """Whether the work has ended, after a while."""
    try:
        work.wait(timedelta(seconds=SLICE))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, or raises its own error
    return True


def _on_the_wire(flat: torch.Tensor, kind: Any) -> tuple[torch.Tensor, Any]:
    """The numbers in a dtype that Gloo reduces, which are fewer than the engine's, and how."""
    if flat.dtype in (torch.int16, torch.uint16, torch.uint32):
        return flat.to(torch.int64), kind
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8), dist.ReduceOp.MAX if kind == dist.ReduceOp.SUM else kind
    if flat.dtype is torch.uint64:
        signed = flat.view(torch.int64)
        # With the highest bit turned they have the order of signed ones.
        return (signed ^ torch.iinfo(torch.int64).min if kind in _ORDERS else signed), kind
    if flat.dtype.is_floating_point and flat.dtype.itemsize == 1:
        return flat.float(), kind
    return (torch.view_as_real(flat) if flat.is_complex() else flat), kind


def _off_the_wire(flat: torch.Tensor, wire: torch.Tensor, kind: Any) -> None:
    if flat.dtype is torch.uint64:
        flat.view(torch.int64).copy_(wire ^ torch.iinfo(torch.int64).min if kind in _ORDERS else wire)
    elif wire is not flat and not flat.is_complex():
        flat.copy_(wire)


_ORDERS = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)

"""A process group over several hosts: shared memory inside each, Gloo between one leader of each.

What is reduced or broadcast crosses the network once per host, and not once per rank. Other collectives
are Gloo's, among all ranks.
"""

# As in _group.py: torch declares each method with its C++ overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.torch.engines import _algorithms as algorithms
from hora.torch.engines._algorithms import Call, Steps
from hora.torch.engines._checks import check_writable
from hora.torch.engines._group import Group
from hora.torch.engines._kernels import divide
from hora.torch.engines._queue import Queue
from hora.torch.engines._team import Team
from hora.torch.engines._vectors import Flat, is_plain, parts_of, source

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
        hosts: the ranks of each host, by their number in this group.
        leaders: a Gloo group of the first ranks of all hosts; None on other ranks.
    """

    def __init__(
        self, gloo: Any, team: Team, *, idle_cores: bool, hosts: Sequence[Sequence[int]], leaders: Any
    ) -> None:
        self._leaders = leaders
        self._places = {
            rank: (host, index) for host, ranks in enumerate(hosts) for index, rank in enumerate(ranks)
        }
        super().__init__(gloo, team, idle_cores=idle_cores)
        self._host = self._places[gloo.rank()][0]

    def _queue(self, idle_cores: bool) -> Queue:
        return Queue(self.team, idle_cores=True, alone=True)

    def empty(
        self, count: int, dtype: torch.dtype, *, wait: Callable[[Any], None] = lambda work: None
    ) -> torch.Tensor:
        """A vector of this rank: what crosses the network is copied anyway."""
        return torch.zeros(count, dtype=dtype, device="cpu")

    def _set_default_timeout(self, timeout: Any) -> None:
        super()._set_default_timeout(timeout)
        if self._leaders is not None:
            self._leaders._set_default_timeout(timeout)

    # --- through the leaders --------------------------------------------------------------------

    def _all_reduce(self, tensors: Tensors, opts: Any) -> Any:
        check_writable(tensors)
        calls = [self._reduction("all_reduce", tensor, opts.reduceOp) for tensor in tensors]

        def steps() -> Steps:
            for tensor, (call, op) in zip(tensors, calls, strict=True):
                with Flat(tensor) as flat:
                    yield from self._reduce_everywhere(call, flat, op)

        return self._run(steps(), calls[0][0], opts, tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._all_reduce(tensors, opts) if is_plain(tensors) else self.gloo.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        if not is_plain(tensors):
            return self.gloo.broadcast(tensors, opts)
        (tensor,) = tensors
        check_writable(tensors)
        call = self._movement("broadcast", tensor, f" from {opts.rootRank}")
        host, index = self._places[opts.rootRank]

        def steps() -> Steps:
            with Flat(tensor) as flat:
                if host == self._host:
                    yield from algorithms.broadcast(self.team, call, flat, index)
                if self._leaders is not None and flat.numel():
                    options = dist.BroadcastOptions()
                    options.rootRank, options.rootTensor = host, 0
                    self._leaders.broadcast([flat.view(torch.uint8)], options).wait()
                if host != self._host:
                    yield from algorithms.broadcast(self.team, call, flat, LEADER)

        return self._run(steps(), call, opts, tensors)

    def barrier(self, opts: Any = None) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        call = Call.of("barrier")

        def steps() -> Steps:
            yield from algorithms.barrier(self.team, call)
            if self._leaders is not None:
                self._leaders.barrier().wait()
            yield from algorithms.barrier(self.team, call)

        return self._run(steps(), call, opts, [])

    def _scatter_all(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        check_writable(outputs)
        calls = [self._reduction("reduce_scatter", tensor, opts.reduceOp) for tensor in outputs]

        def steps() -> Steps:
            for tensor, parts, (call, op) in zip(outputs, inputs, calls, strict=True):
                whole = torch.cat([source(part) for part in parts])
                yield from self._reduce_everywhere(call, whole, op)
                with Flat(tensor) as flat:
                    flat.copy_(parts_of(whole, self.size())[self.rank()])

        return self._run(steps(), calls[0][0], opts, outputs)

    def _reduce_everywhere(self, call: Call, flat: torch.Tensor, op: Any) -> Steps:
        average = op == dist.ReduceOp.AVG
        kind = dist.ReduceOp.SUM if average else op
        yield from algorithms.reduce(self.team, call, flat, LEADER, kind)
        if self._leaders is not None and flat.numel():
            # Through the whole group's dtypes: Gloo reduces fewer than the engine does.
            _reduce_with_gloo(self._leaders, flat, kind)
            if average:
                divide(flat, self.size())
        yield from algorithms.broadcast(self.team, call, flat, LEADER)

    # --- Gloo's, among all ranks ----------------------------------------------------------------

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        return self.gloo.reduce(tensors, opts)

    def _gather_all(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, result: Any) -> Any:
        works = [
            self.gloo.allgather([list(parts)], [tensor], opts)
            for parts, tensor in zip(outputs, inputs, strict=True)
        ]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        return self.gloo.gather(outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        return self.gloo.scatter(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        return self.gloo.alltoall_base(output, input, list(output_splits), list(input_splits), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        return self.gloo.alltoall(outputs, inputs, opts)


def _reduce_with_gloo(leaders: Any, flat: torch.Tensor, op: Any) -> None:
    wire, kind = flat, op
    if flat.dtype in (torch.int16, torch.uint16, torch.uint32):
        wire = flat.to(torch.int64)
    elif flat.dtype is torch.bool:
        wire = flat.to(torch.uint8)
        kind = dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op
    elif flat.dtype is torch.uint64:
        wire = flat.view(torch.int64)
        if kind in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):  # with the highest bit turned they have its order
            wire = wire ^ torch.iinfo(torch.int64).min
    elif flat.dtype.is_floating_point and flat.dtype.itemsize == 1:
        wire = flat.float()
    elif flat.is_complex():
        wire = torch.view_as_real(flat)
    options = dist.AllreduceOptions()
    options.reduceOp = kind
    leaders.allreduce([wire], options).wait()
    if flat.dtype is torch.uint64:
        ordered = kind in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        flat.view(torch.int64).copy_(wire ^ torch.iinfo(torch.int64).min if ordered else wire)
    elif wire is not flat and not flat.is_complex():
        flat.copy_(wire)

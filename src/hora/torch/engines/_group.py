"""The process group that ``torch.distributed`` calls: the shared-memory engine, with Gloo for the rest.

Registered as the backend "hora". Collectives of CPU tensors go through the memory that the ranks of one
host share. Messages between two ranks (send, recv), sparse tensors, tensors without bytes are Gloo's.
"""

# torch declares each method with its C++ overloads; of those, only the form with options is ever called.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from hora.torch.engines import _algorithms as algorithms
from hora.torch.engines._algorithms import Bounded, Call, Steps
from hora.torch.engines._buffers import Buffers, shared_vector
from hora.torch.engines._checks import check_kind, check_lists, check_rows, check_whole, check_writable
from hora.torch.engines._kernels import reducible
from hora.torch.engines._modes import undisturbed
from hora.torch.engines._operation import DONE
from hora.torch.engines._queue import Queue
from hora.torch.engines._team import Team
from hora.torch.engines._vectors import Flat, Flats, is_plain, parts_of, plain_vector, source, split_rows

__all__ = ["Group"]

Tensors = Sequence[torch.Tensor]


class Group(dist.ProcessGroup):
    """A process group whose ranks share memory.

    Args:
        gloo: a Gloo group of the same ranks.
        team: the ranks.
        idle_cores: whether the host has cores on which nothing computes.
        stall_after: seconds of waiting after which the log names who has not come; 0: never.
    """

    def __init__(self, gloo: Any, team: Team, *, idle_cores: bool, stall_after: float) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.gloo, self.ordinary, self.team = gloo, _ordinary(gloo), team
        self.buffers = Buffers()
        self.queue = self._queue(idle_cores=idle_cores, stall_after=stall_after)
        self._reductions: dict[Any, tuple[Call, Any]] = Bounded()
        self._movements: dict[Any, Call] = Bounded()
        self._name = self._description = ""

    def _queue(self, *, idle_cores: bool, stall_after: float) -> Queue:
        return Queue(self.team, idle_cores=idle_cores, stall_after=stall_after)

    # --- what torch asks ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "hora"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.team.timeout = timeout.total_seconds()
        self.gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        """End what is under way, and refuse what comes later."""
        self.team.fail("The group was aborted.")

    def shutdown(self) -> None:
        self.queue.close("The group was destroyed.")
        self.team.close()

    # --- collectives ----------------------------------------------------------------------------

    @undisturbed
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = dist.AllreduceOptions() if opts is None else opts
        flat = plain_vector(tensors[0]) if len(tensors) == 1 else None  # by far the most frequent
        if flat is not None:
            call, op = self._reduction("all_reduce", flat, opts.reduceOp)
            return self._run(self._reduce_everywhere(call, flat, op), call, opts, tensors)
        if not is_plain(tensors):
            return self.ordinary.allreduce(tensors, opts)
        return self._all_reduce(tensors, opts)

    @undisturbed
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        if not is_plain(tensors):
            return self.ordinary.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Tensors, opts: Any) -> Any:
        check_writable(tensors)
        calls = [self._reduction("all_reduce", tensor, opts.reduceOp) for tensor in tensors]

        def steps() -> Steps:
            for tensor, (call, op) in zip(tensors, calls, strict=True):
                with Flat(tensor) as flat:
                    yield from self._reduce_everywhere(call, flat, op)

        return self._run(steps(), calls[0][0], opts, tensors)

    @undisturbed
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        if not is_plain(tensors):
            return self.ordinary.reduce(tensors, opts)
        (tensor,) = tensors
        check_writable(tensors)
        call, op = self._reduction("reduce", tensor, opts.reduceOp, f" to {opts.rootRank}")

        def steps() -> Steps:
            with Flat(tensor) as flat:
                yield from self._reduce_to(call, flat, opts.rootRank, op)

        return self._run(steps(), call, opts, tensors)

    @undisturbed
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        if not is_plain(tensors):
            return self.ordinary.broadcast(tensors, opts)
        (tensor,) = tensors
        check_writable(tensors)
        call = self._movement("broadcast", tensor, f" from {opts.rootRank}")

        def steps() -> Steps:
            with Flat(tensor) as flat:
                yield from self._spread(call, flat, opts.rootRank)

        return self._run(steps(), call, opts, tensors)

    @undisturbed
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not is_plain([*inputs, *outputs[0]]):
            return self.ordinary.allgather(outputs, inputs, opts)
        return self._gather_all([list(outputs[0])], list(inputs), opts, outputs)

    @undisturbed
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not is_plain([input, output]):
            return self.ordinary._allgather_base(output, input, opts)
        return self.all_gather_single_coalesced([output], [input], opts)

    all_gather_single = _allgather_base

    @undisturbed
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not is_plain([*inputs, *outputs]):
            return self.ordinary.allgather_into_tensor_coalesced(outputs, inputs, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, tensor, self.size())
        parts = [parts_of(output, self.size()) for output in outputs]
        return self._gather_all(parts, inputs, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @undisturbed
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not is_plain([*inputs, *itertools.chain(*outputs)]):
            return self.ordinary.allgather_coalesced(outputs, inputs, opts)
        # The outer list is the ranks', the inner one the tensors'.
        return self._gather_all([list(each) for each in zip(*outputs, strict=True)], inputs, opts, outputs)

    def _gather_all(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, result: Any) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            check_lists("all_gather", parts, tensor, self.size())
            check_writable(parts)
        calls = [self._movement("all_gather", tensor) for tensor in inputs]

        def steps() -> Steps:
            for parts, tensor, call in zip(outputs, inputs, calls, strict=True):
                with Flats(parts) as flats:
                    yield from self._collect_everywhere(call, flats, source(tensor))

        return self._run(steps(), calls[0], opts, result)

    @undisturbed
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        if not is_plain([*inputs, *itertools.chain(*outputs)]):
            return self.ordinary.gather(outputs, inputs, opts)
        (tensor,) = inputs
        if outputs:
            check_lists("gather", outputs[0], tensor, self.size())
            check_writable(outputs[0])
        call = self._movement("gather", tensor, f" to {opts.rootRank}")

        def steps() -> Steps:
            with Flats(outputs[0] if outputs else []) as flats:
                yield from self._collect(call, flats or None, source(tensor), opts.rootRank)

        return self._run(steps(), call, opts, outputs)

    @undisturbed
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        if not is_plain([*outputs, *itertools.chain(*inputs)]):
            return self.ordinary.scatter(outputs, inputs, opts)
        (tensor,) = outputs
        if inputs:
            check_lists("scatter", inputs[0], tensor, self.size())
        check_writable(outputs)
        call = self._movement("scatter", tensor, f" from {opts.rootRank}")

        def steps() -> Steps:
            sources = [source(each) for each in inputs[0]] if inputs else None
            with Flat(tensor) as flat:
                yield from self._deal(call, flat, sources, opts.rootRank)

        return self._run(steps(), call, opts, outputs)

    @undisturbed
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not is_plain([*outputs, *itertools.chain(*inputs)]):
            return self.ordinary.reduce_scatter(outputs, inputs, opts)
        for output, parts in zip(outputs, inputs, strict=True):
            check_lists("reduce_scatter", parts, output, self.size())
        return self._scatter_all(outputs, [list(each) for each in inputs], opts)

    @undisturbed
    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not is_plain([output, input]):
            return self.ordinary._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    @undisturbed
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not is_plain([*outputs, *inputs]):
            return self.ordinary.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", tensor, output, self.size())
        parts = [parts_of(source(tensor), self.size()) for tensor in inputs]
        return self._scatter_all(outputs, parts, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_all(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        check_writable(outputs)
        calls = [self._reduction("reduce_scatter", tensor, opts.reduceOp) for tensor in outputs]

        def steps() -> Steps:
            for tensor, parts, (call, op) in zip(outputs, inputs, calls, strict=True):
                with Flat(tensor) as flat:
                    yield from self._reduce_parts(call, flat, [source(part) for part in parts], op)

        return self._run(steps(), calls[0][0], opts, outputs)

    @undisturbed
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        if not is_plain([output, input]):
            return self.ordinary.alltoall_base(output, input, output_splits, input_splits, opts)
        check_rows("all_to_all", output, output_splits, self.size())
        check_rows("all_to_all", input, input_splits, self.size())
        outputs = split_rows(output, output_splits, self.size())
        return self.alltoall(outputs, split_rows(input, input_splits, self.size()), opts)

    alltoall_base = all_to_all_single

    @undisturbed
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        if not is_plain([*outputs, *inputs]):
            return self.ordinary.alltoall(outputs, inputs, opts)
        for tensors in (outputs, inputs):
            check_kind("all_to_all", tensors, outputs[0], self.size())
        check_writable(outputs)

        sources = [source(tensor).view(torch.uint8) for tensor in inputs]
        return self._run(self._exchange(_ALL_TO_ALL, outputs, sources), _ALL_TO_ALL, opts, outputs)

    @undisturbed
    def barrier(self, opts: Any = None) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        return self._run(self._meet(_BARRIER), _BARRIER, opts, [])

    # --- messages between two ranks -------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self.ordinary.send(tensors, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self.ordinary.recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.ordinary.recv_anysource(tensors, tag)

    # --- shared vectors -------------------------------------------------------------------------

    @undisturbed
    def empty(
        self, count: int, dtype: torch.dtype, *, wait: Callable[[Any], None] = lambda work: work.wait()
    ) -> torch.Tensor:
        """A vector in memory that all ranks of the group share: collectives of it copy nothing.

        All ranks call it alike. The memory is given back when no tensor uses it. Where one of them can get
        none (it has too many files open, say), all get ordinary memory, with a warning. ``wait`` waits for
        the collectives that this takes, where a plain ``work.wait()`` would not do.
        """
        return shared_vector(self, count, dtype, wait)

    # --- how ranks of one host do it; those of several have other ways -----------------------------

    def _reduce_everywhere(self, call: Call, flat: torch.Tensor, op: Any) -> Steps:
        return algorithms.all_reduce(self.team, call, flat, op, self.buffers)

    def _reduce_to(self, call: Call, flat: torch.Tensor, root: int, op: Any) -> Steps:
        return algorithms.reduce(self.team, call, flat, root, op)

    def _reduce_parts(self, call: Call, flat: torch.Tensor, parts: Tensors, op: Any) -> Steps:
        return algorithms.reduce_scatter(self.team, call, flat, parts, op=op, buffers=self.buffers)

    def _spread(self, call: Call, flat: torch.Tensor, root: int) -> Steps:
        return algorithms.broadcast(self.team, call, flat, root)

    def _collect_everywhere(self, call: Call, flats: Tensors, flat: torch.Tensor) -> Steps:
        return algorithms.all_gather(self.team, call, flats, flat, self.buffers)

    def _collect(self, call: Call, flats: Tensors | None, flat: torch.Tensor, root: int) -> Steps:
        return algorithms.gather(self.team, call, flats, flat, root)

    def _deal(self, call: Call, flat: torch.Tensor, parts: Tensors | None, root: int) -> Steps:
        return algorithms.scatter(self.team, call, flat, parts, root)

    def _exchange(self, call: Call, outputs: Tensors, sources: Tensors) -> Steps:
        with Flats(outputs) as flats:
            yield from algorithms.all_to_all(self.team, call, [f.view(torch.uint8) for f in flats], sources)

    def _meet(self, call: Call) -> Steps:
        return algorithms.barrier(self.team, call)

    # --- below ----------------------------------------------------------------------------------

    def _run(self, steps: Steps, call: Call, opts: Any, result: Any) -> Any:
        if opts.asyncOp:
            return self.queue.start(steps, result, call.text)
        self.queue.call(steps, call.text)
        return DONE

    def _reduction(self, name: str, tensor: torch.Tensor, op: Any, how: str = "") -> tuple[Call, Any]:
        """What all ranks must call alike, and the operation's plain form."""
        key = (name, tensor.dtype, tensor.numel(), hash(op), how)  # its number: torch compares them slowly
        found = self._reductions.get(key)
        if found is None:
            kind = reducible(tensor.dtype, op)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found = Call.of(f"{name} {kind.name} of {tensor.numel()} elements of {dtype}{how}"), kind
            self._reductions[key] = found
        return found

    def _movement(self, name: str, tensor: torch.Tensor, how: str = "") -> Call:
        """As above, of data that is only moved: the number of bytes counts."""
        key = (name, tensor.numel() * tensor.element_size(), how)
        found = self._movements.get(key)
        if found is None:
            found = self._movements[key] = Call.of(f"{name} of {key[1]} bytes{how}")
        return found


def _ordinary(gloo: Any) -> Any:
    """Torch's own group around Gloo: what is no plain memory goes there, and is treated as anywhere."""
    group = dist.ProcessGroup(gloo.rank(), gloo.size())  # type: ignore[call-arg]
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


_ALL_TO_ALL, _BARRIER = Call.of("all_to_all"), Call.of("barrier")

"""What a collective is asked to do, and who does it: the seam below every public operation.

A public operation builds a :class:`Request` and submits it to the dispatcher in force. The native one
runs it at once, in the order of the calls; another may first match it with the other ranks by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hora.adapter.ops import Kind, ReduceOp, refuse_presentation

if TYPE_CHECKING:
    import torch.distributed as dist

    from hora.torch._process_sets import ProcessSet

__all__ = ["Dispatcher", "Request", "Work", "dispatcher", "use"]


@dataclass(kw_only=True, eq=False)
class Request:
    """One collective, as this rank asks for it.

    Attributes:
        kind: which collective.
        name: what it is called in the timeline, in errors, and where operations are matched by name.
        tensors: this rank's tensors: one, or those of a group; none for a barrier. Any memory layout.
        outputs: where the results go (the in-place forms, same shapes as the inputs); None makes new
            tensors.
        op: the reduction of ALLREDUCE and REDUCESCATTER.
        prescale: factor applied before the reduction.
        postscale: factor applied after it.
        root: the sending rank of BROADCAST, counted in the whole job.
        splits: rows for each member of the process set, for ALLTOALL; None splits evenly.
        process_set: who takes part.
        grouped: whether ``tensors`` is a group, so that the result is a list.
        narrow: whether half precision is also added up in half precision, which halves what travels;
            otherwise it is reduced in float32 and rounded once.
        scaled_apart: whether float16 is rounded between ``prescale`` and the reduction, as if it had been
            scaled before: Horovod's way, which some of its scripts compare to the last bit.
        rows: first dimensions on all members, where they are known already: ``rows[tensor][member]`` for
            ALLGATHER, ``rows[member]`` (its splits) for ALLTOALL. None lets the ranks tell each other.
        own_group: a group of the same members that carries it instead of the process set's, for a
            dispatcher that runs requests on another thread than the script's: on one group they would
            interleave with what the script itself starts on it.
    """

    kind: Kind
    name: str | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: torch.Tensor | None = None
    process_set: ProcessSet
    grouped: bool = False
    narrow: bool = False
    scaled_apart: bool = False
    rows: list[list[int]] | None = None
    own_group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """What carries it."""
        return self.process_set.group if self.own_group is None else self.own_group


class Work(Protocol):
    """A request under way."""

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        ...

    def wait(self) -> Any:
        """The result.

        A tensor, a list of them for a group, None for a barrier, or a pair of output and received splits
        for ALLTOALL.
        """
        ...


class Dispatcher(Protocol):
    """Who carries requests out.

    Attributes:
        as_horovod: whether operations do as Horovod does where Hora's own choice differs: an ``Average`` of
            integers is truncated, and some gradients have another factor (see ``_autograd``).
    """

    as_horovod: bool

    def submit(self, request: Request) -> Work:
        """Start the request; errors of this rank's arguments are raised here, others by ``wait``."""
        ...


_dispatcher: Dispatcher | None = None


def dispatcher() -> Dispatcher:
    """The dispatcher in force: the native one, unless :func:`use` chose another."""
    refuse_presentation()
    if _dispatcher is not None:
        return _dispatcher
    from hora.torch._execute import native  # it builds on this module

    return native


def use(dispatcher: Dispatcher | None) -> None:
    """Send every later request to ``dispatcher``; None restores the native one."""
    global _dispatcher
    _dispatcher = dispatcher

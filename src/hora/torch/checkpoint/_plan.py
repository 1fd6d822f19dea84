"""Who writes what: DCP's planner, the ranks' files as it has planned them, and the copy of the state."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from hora.torch._context import Context
from hora.torch._objects import gather_objects
from hora.torch.checkpoint import _layout
from hora.torch.checkpoint._collect import Collected
from hora.torch.checkpoint._optimizers import Part
from hora.torch.checkpoint._storage import spans_of

__all__ = ["Copy", "Planned", "Plans", "signature"]


@dataclass
class Planned:
    """What the ranks agreed on, for objects of certain names and shapes.

    Attributes:
        agreed: the signatures of all ranks' objects.
        plan: what this rank writes.
        layout: of all ranks' files, as it is written; empty but on rank 0.
        buffer: this rank's file. It is used again for each checkpoint, so that memory is taken once.
        views: for each item of the plan its place in the buffer.
    """

    agreed: tuple[int, ...]
    plan: SavePlan
    layout: bytes
    buffer: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)


class Plans:
    """Plans anew when the objects have changed, and only then.

    Args:
        context: of the job.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: Planned | None = None

    def planned(self, collected: Collected, agreed: tuple[int, ...]) -> Planned:
        """The plan for these objects; every rank calls it with the same ``agreed``."""
        if self._last is None or self._last.agreed != agreed:
            self._last = None  # its buffer may go before the next is made
            self._last = self._made(collected, agreed)
        return self._last

    def _made(self, collected: Collected, agreed: tuple[int, ...]) -> Planned:
        context = self._context
        rank, size = context.world.rank, context.world.size
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(collected.tensors, is_coordinator=rank == 0)
        plans = gather_objects(planner.create_local_plan(), context)
        plans, metadata = planner.create_global_plan(plans)  # each rank does, with the same result
        files = [spans_of(plan, _layout.rank_files(place)[0]) for place, plan in enumerate(plans)]
        metadata = Metadata(
            state_dict_metadata=metadata.state_dict_metadata,
            storage_data={index: span for file in files for index, span in file.spans.items()},
        )
        plan, file = planner.finish_plan(plans[rank]), files[rank]
        buffer = _memory(file.size, pin=context.device.type == "cuda")
        buffer[: len(file.header)] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        layout = _layout.dump(metadata, world=size) if rank == 0 else b""
        made = Planned(agreed, plan, layout, buffer)
        for item in plan.items:
            assert item.tensor_data is not None, "plans hold tensors only"
            span = file.spans[item.index]
            line = buffer[span.offset : span.offset + span.length].view(item.tensor_data.properties.dtype)
            made.views.append(line.view(tuple(item.tensor_data.chunk.sizes)))
        return made


class Copy:
    """The copy of what this rank writes: a part of it is made at once, the rest by a thread of its own.

    An optimizer's state is changed by its ``step()`` and by nothing else, so that it need not be copied
    before the next step. All else may change as soon as ``save`` has returned. On a GPU all is copied at
    once, which the host does not wait for.

    Args:
        planned: what is written, and where to.
        collected: the objects' tensors.
        device: where this rank computes.
        later: whether anything may be left to the thread.
    """

    def __init__(self, planned: Planned, collected: Collected, device: torch.device, *, later: bool) -> None:
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._thread: threading.Thread | None = None
        self._event: Any = None
        self._intact = True
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item, view in zip(planned.plan.items, planned.views, strict=True):
            name = item.index.fqn
            source = _local(collected.tensors[name])
            if later and name in collected.kept_until_step and source.is_cpu:
                self._later.append((view, source, source._version))
            else:
                now.append((view, source))
        with torch.no_grad():
            if now:
                views, sources = zip(*now, strict=True)
                torch._foreach_copy_(views, sources, non_blocking=True)
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        if self._later:  # not before: the two would take the core from each other
            self._thread = threading.Thread(target=self._rest, name="hora-copy", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until everything may be changed."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> bool:
        """Wait until the copy can be read; whether it is of one moment: nothing was changed meanwhile."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()
        return self._intact

    def _rest(self) -> None:
        with torch.no_grad():
            for view, source, _ in self._later:
                view.copy_(source)
        # Looked at here: with the end of this thread a step may begin.
        self._intact = all(source._version == version for _, source, version in self._later)


def _memory(size: int, *, pin: bool) -> torch.Tensor:
    """Bytes, all of them zero and in memory by now."""
    if pin:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    # Unlike torch, numpy asks for huge pages, which make copies to it faster.
    found = torch.from_numpy(numpy.empty(size, dtype=numpy.uint8))
    return found.zero_()


def signature(tensors: Mapping[str, Any]) -> int:
    """Equal for objects whose plan is the same: 64 bits, signed."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        if isinstance(tensor, Part):
            line = f"{name} {tensor.values.dtype} {tensor.start} {tensor.values.numel()} {tensor.total}"
        else:
            line = f"{name} {tensor.dtype} {tuple(tensor.shape)} {getattr(tensor, 'placements', '')}"
        digest.update(line.encode() + b"\n")
    return int.from_bytes(digest.digest(), "little", signed=True)


def _local(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, Part):
        return tensor.values
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]

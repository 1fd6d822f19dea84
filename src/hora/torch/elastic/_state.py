"""What a training is made of: kept in memory at each commit, and given to workers that come later."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hora.adapter.guard import collective
from hora.core.errors import UsageError, WorldChangedError
from hora.core.presentation import presenting
from hora.torch._context import required
from hora.torch._edge import saves_at_edges, stop_for_now
from hora.torch._objects import broadcast_object
from hora.torch._state import broadcast_optimizer_state, broadcast_parameters
from hora.torch._wire import start_gather, wait_for
from hora.torch.elastic._resize import Resize, Rule, loaders_of
from hora.torch.elastic._sampler import ElasticSampler
from hora.torch.elastic._streams import gather_streams, take_stream
from hora.torch.shard._methods import SpreadState

__all__ = ["ObjectState", "State", "TorchState"]

STOP = 2
"""What a rank says in a commit when the job is asked to stop; 1 when workers wait, 0 otherwise."""


class State:
    """The form of a state; derive from it for what :class:`TorchState` cannot hold.

    A subclass has ``save()``, ``restore()`` and ``sync()``.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._steps = 0
        self._repeats = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after each change of the workers, before the training goes on."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The job has another set of workers now."""
        self._repeats = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now: no worker's end takes it away from the others any more.

        Every rank calls it at the same place. It is also where workers that wait are taken in.

        Raises:
            WorldChangedError: :func:`run` handles it.
            StopForNow: a ``SystemExit`` with code 75: the job was asked to stop.
        """
        # In this order: who has seen a commit has all of it, and when one rank has come out of the agreement
        # all have saved.
        self.save()
        self._commits += 1
        self._steps = 0
        context = required("commit")
        if context.member is not None and context.world.rank == 0:
            context.member.control.tell("commit", number=context.member.number, commits=self._commits)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let workers that wait be taken in now, with the state as it is. Every rank calls it.

        Raises:
            WorldChangedError: :func:`run` handles it.
        """
        context = required("check_host_updates")
        member = context.member
        if member is None:
            return
        mine = STOP if member.control.stopping and not saves_at_edges() else int(member.control.updated)
        due = torch.tensor([mine], dtype=torch.int32, device=context.control)
        if context.world.size > 1:
            with collective(context, "commit", [due]):
                context.presence.call("commit", _everyone())
                wait_for(
                    dist.all_reduce(due, dist.ReduceOp.MAX, group=context.group, async_op=True),
                    due,
                    context.group,
                )
        if due.item() == STOP:
            self.save()
            stop_for_now(context, self._commits)
        if due.item():
            self.save()
            raise self._interrupt()

    def _interrupt(self) -> Exception:
        return WorldChangedError(
            "The set of workers changes.", fix="Let hora.elastic.run see this exception: it goes on."
        )

    def reset(self) -> None:
        """The workers have changed; for subclasses."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of one that has seen the most commits."""
        raise NotImplementedError

    def told(self) -> dict[str, int]:
        """What the supervisor is told."""
        return {"commits": self._commits, "repeats": self._repeats}

    def _root(self) -> int:
        """The first of the ranks that have seen the most commits; all ranks learn how many those are."""
        context = required("sync")
        size = context.world.size
        mine = torch.tensor([self._commits], dtype=torch.int64, device=context.control)
        if size == 1:
            return 0
        everyone = mine.new_empty(size)
        with collective(context, "sync", [mine]):
            context.presence.call("sync", _everyone())
            wait_for(start_gather(everyone, mine, context.group), mine, context.group)
        commits: list[int] = everyone.tolist()
        self._commits = max(commits)
        return commits.index(self._commits)


class ObjectState(State):
    """A state of plain values, which are its attributes. One that is set later belongs to it as well.

    Args:
        values: names and values; anything that can be copied and pickled.
    """

    def __init__(self, **values: Any) -> None:
        self._names: list[str] = []
        self._saved_values: dict[str, Any] = {}
        super().__init__()
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(
                    f"{name}= cannot be a value of a state: it has an attribute of that name.",
                    fix=f"Write another name, such as {name.strip('_')}_value=...",
                )
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            self._names.append(name)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies of the values."""
        self._saved_values = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to the values of the last copy."""
        self._repeats, self._steps = self._steps, 0
        for name in set(self._names) - set(self._saved_values):  # set since that copy
            delattr(self, name)
        self._names = list(self._saved_values)
        for name, value in self._saved_values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give all ranks the values of one that has seen the most commits."""
        self._sync(self._root())
        self.save()

    def _sync(self, root: int) -> None:
        values = broadcast_object({name: getattr(self, name) for name in self._names}, root)
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """The state of a training: model, optimizer, loader, and whatever else counts.

    ``commit()`` copies all of it, so that a later step cannot change what was committed. The random streams
    of torch, numpy and Python are copied as well, those of all ranks on each: whoever takes the place of a
    worker that died goes on with its numbers. So is an optimizer with ``shard="optimizer"``: every rank keeps
    the whole state of a commit in the host's memory.

    Args:
        model: a module.
        optimizer: an optimizer, as ``DistributedOptimizer`` returns it.
        loader: what :func:`hora.torch.data_loader` returned.
        resize: what another number of workers changes: ``"keep"`` nothing, as the global batch stays;
            ``"scale"`` the global batch, as each worker's stays, and with it the learning rate, linearly.
            Both are given for the number of workers that the job begins with.
        values: by name: anything with ``state_dict()`` and ``load_state_dict()``, such as a schedule, or
            plain values. All become attributes, and what is set as an attribute later belongs to the state as
            well.

    Raises:
        UsageError: an optimizer with ``shard="all"``, another ``resize``, or a value of a name that the state
            has already.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        loader: Any = None,
        *,
        resize: Rule = "keep",
        **values: Any,
    ) -> None:
        given_optimizer: Any = optimizer
        if isinstance(given_optimizer, SpreadState) and given_optimizer._hora.fully:
            raise UsageError(
                "The model is spread over the workers by shard='all', and a worker that dies takes its share "
                "of the parameters along: the others cannot go on with what they have.",
                fix="Write shard='optimizer', whose commits hold all; or keep shard='all', with "
                "hora.Checkpoints and `hora run --restarts 3` instead of --min-workers.",
            )
        self._resize = Resize(resize)
        self._begun = False  # the training, on some rank
        self._parts: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        self._streams: torch.Tensor | None = None
        main = {"model": model, "optimizer": optimizer, "loader": loader}
        super().__init__(**{name: part for name, part in main.items() if part is not None}, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            super().__setattr__(name, value)
            return
        object.__setattr__(self, name, value)
        if isinstance(value, Optimizer) and self._parts.get(name) is not value:
            value.register_step_post_hook(self._stepped)
            self._resize.watch(value)
        self._parts[name] = value
        if name in self._names:
            self._names.remove(name)

    @property
    def lr_factor(self) -> float:
        """By what ``resize="scale"`` multiplies learning rates in ``step()``; groups show them without it."""
        return self._resize.factor

    def save(self) -> None:
        """Keep copies of all parts, and of the values. Every rank calls it."""
        context = required("elastic.TorchState")
        saved = {name: _copied(part) for name, part in self._parts.items()}
        self._streams, self._row = gather_streams(context, self._streams)
        super().save()
        self._saved = saved

    def restore(self) -> None:
        """Go back to the last copies."""
        for name in set(self._parts) - set(self._saved):  # set since then
            del self._parts[name]
            delattr(self, name)
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved[name]))
        super().restore()
        assert self._streams is not None, "save() came before"
        context = required("elastic.TorchState")
        take_stream(self._streams, context, rank=self._row, commits=self._commits)

    def reset(self) -> None:
        """Samplers share out anew."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()

    def _sync(self, root: int) -> None:
        context = required("sync")
        size, loaders = context.world.size, loaders_of(self._parts)
        about = self._begun, self._streams, self._resize.told(loaders, size)
        begun, rows, resize = broadcast_object(about, root)
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part, root)
            elif isinstance(part, SpreadState) and part._hora.spread:
                if begun:
                    part._hora.share_out(part, self._saved.get(name), root)
            elif isinstance(part, Optimizer):
                broadcast_optimizer_state(part, root)
            else:
                state = broadcast_object(part.state_dict(), root)
                if context.world.rank != root:
                    part.load_state_dict(state)
        super()._sync(root)
        self._resize.apply(resize, loaders, size)
        if begun:
            self._streams = rows
            take_stream(rows, context, rank=context.world.rank, commits=self._commits)
        self._begun = True
        if context.member is not None and context.world.rank == 0:
            loader = next(iter(loaders.values()), None)
            with presenting():
                print(f"hora: {self._resize.text(loader, size)}", file=sys.stderr, flush=True)

    def _stepped(self, *_: Any) -> None:
        self._steps += 1


def _copied(part: Any) -> Any:
    state = part.state_dict()
    if isinstance(part, SpreadState) and part._hora.shards is not None:
        # It was gathered, so it is a copy. It is large: not for the memory of a device, where it is in parts.
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    return copy.deepcopy(state)


def _everyone() -> Any:
    from hora.torch._process_sets import global_process_set

    return global_process_set

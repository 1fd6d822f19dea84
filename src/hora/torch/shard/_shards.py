"""An optimizer that each rank runs on its share of the parameters.

The user's optimizer keeps its parameter groups, with whole parameters, and its hyper-parameters. Its state
is that of this rank's pieces. A step goes to a stand-in of the plain class whose groups hold the pieces.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hora.adapter.guard import collective
from hora.core.errors import GradientError
from hora.torch._context import Context
from hora.torch._groups import Groups
from hora.torch._layerwise import Columns, Layerwise, Norms, sums_of_squares
from hora.torch.shard._across import Across
from hora.torch.shard._bucket import ShardBucket
from hora.torch.shard._flat import Flat, Member, spread
from hora.torch.shard._gradient import GradientShare
from hora.torch.shard._inner import give_back, stand_in
from hora.torch.shard._moves import start_gather
from hora.torch.shard._pieces import Pieces
from hora.torch.shard._reducer import ShardReducer
from hora.torch.shard._rule import ShardRule
from hora.torch.shard._states import gather_states

__all__ = ["Shards"]

Named = tuple[str, torch.Tensor]


class Shards:
    """What is added to an optimizer whose state is spread over the ranks.

    Args:
        optimizer: it.
        context: of the job.
        named: names and parameters, in order of registration.
        plain: its class, without what is added.
        scalars: entries of the state that are one number for a tensor.
        bucket_mb: size of a flat buffer.
        rule: how gradients are reduced.
        groups: parameters that share a flat buffer.
        number: of the optimizer, among those that work over all ranks.

    Attributes:
        reducer: makes the averages.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        context: Context,
        named: Sequence[Named],
        *,
        plain: type[Optimizer],
        scalars: set[str],
        bucket_mb: float,
        rule: ShardRule,
        groups: Groups,
        number: int | None,
    ) -> None:
        self._plain = plain
        self._context = context
        self._scalars = scalars
        self._bucket_mb = bucket_mb
        self._rule = rule
        self._across = Across(context, rule.process_set)
        self._buckets: list[ShardBucket] = []
        self._pieces: list[Pieces] = []
        self._inner: Any = None
        self._layerwise = issubclass(plain, Layerwise)
        self._lay_out(optimizer, named, groups)
        self.reducer = ShardReducer(context, self._buckets, rule=rule, number=number)

    def add(self, optimizer: Optimizer, named: Sequence[Named]) -> None:
        """Take in more parameters."""
        self._lay_out(optimizer, named, Groups())
        self.reducer.extend()

    # --- a step ---------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> Optimizer:
        """The stand-in that makes the step that the optimizer was asked for."""
        self._inner = stand_in(optimizer, self._plain, self._by_group(optimizer), optimizer.state)
        if self._layerwise:
            self._inner._hora_norms = self._norms
        return self._inner  # type: ignore[no-any-return]

    def settle(self) -> None:
        """The gradients are there: give the stand-in this rank's share of their averages."""
        self.reducer.before_step()
        with torch.no_grad():
            for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
                self._settle(bucket, pieces)
        for group, own in zip(self._inner.param_groups, self._by_group(self._inner), strict=True):
            group["params"][:] = own

    def finish(self, optimizer: Optimizer) -> None:
        """After the stand-in's step: let all ranks have the new parameters."""
        inner, self._inner = self._inner, None
        give_back(inner, optimizer)
        self._gather()

    def _settle(self, bucket: ShardBucket, pieces: Pieces) -> None:
        flat = bucket.flat
        flat.take_in()
        for member in flat.members:
            gradient = member.parameter.grad
            if gradient is not None and not isinstance(gradient, GradientShare):
                # Set by hand since backward: it counts as it is, as in a plain optimizer.
                start, stop = bucket.bounds(member)
                bucket.part(member).copy_(member.line(gradient)[start:stop])
        pieces.split(_has_gradient, self._inner.state)
        for piece in pieces:
            present = _has_gradient(piece.members[0])
            part = bucket.average[piece.start - flat.first : piece.stop - flat.first]
            piece.parameter.grad = part if present else None

    def _by_group(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for pieces in self._pieces:
            for piece in pieces:
                groups[piece.group].append(piece.parameter)
        return groups

    def _norms(self, parameters: Sequence[torch.Tensor], columns: Columns) -> Norms:
        """Norms of whole parameters, of which the stand-in has pieces; one message for all."""
        places: dict[int, int] = {}
        first = 0
        for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
            places.update((id(piece.parameter), first + piece.members[0].number) for piece in pieces)
            first += len(bucket.flat.members)
        own = [places[id(parameter)] for parameter in parameters]
        wire = torch.zeros(len(columns), first, dtype=torch.float64, device=self._context.control)
        for row, squares in zip(wire, sums_of_squares(columns), strict=True):
            row[own] = squares.to(wire.device)
        self._across.add_up(wire, "norms of parameters")
        return [
            row[own].to(column[0].device) if own else row[own]
            for row, column in zip(wire.sqrt_(), columns, strict=True)
        ]

    def _gather(self) -> None:
        """Fill the flat buffers, and so the parameters, with what each rank has made of its share."""
        context, process_set = self._context, self._rule.process_set
        flats = [bucket.flat for bucket in self._buckets if _moves(bucket)]
        with (
            context.timeline.span("wait for parameters"),
            collective(context, "gather parameters", [flat.own for flat in flats], process_set=process_set),
        ):
            number = context.presence.call("step()", process_set)
            works = [start_gather(flat.wire, flat.own, process_set.group) for flat in flats]
            for flat, work in zip(flats, works, strict=True):
                context.presence.wait(
                    work, flat.device, process_set=process_set, number=number, what="step()"
                )
        for flat in flats:
            flat.touched()

    # --- the state ------------------------------------------------------------------------------

    @property
    def shares(self) -> list[tuple[Flat, Pieces]]:
        """The flat buffers, and this rank's pieces of each; their state is in the optimizer's."""
        return [(bucket.flat, pieces) for bucket, pieces in zip(self._buckets, self._pieces, strict=True)]

    def whole(self, optimizer: Optimizer, *, keep: bool = True) -> Any:
        """A plain optimizer on the whole parameters with the state of all ranks. Every rank calls it.

        Args:
            optimizer: the sharded one.
            keep: whether this rank wants the state; without, it is empty.
        """
        state = gather_states(
            self.shares,
            optimizer.state,
            self._context,
            self._rule.process_set,
            keep=keep,
        )
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return self._plain_one(optimizer, {key: state[key] for key in order if key in state})

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take the hyper-parameters, and this rank's share of the state, of a plain optimizer."""
        plain = self._plain_one(optimizer, {})
        vars(plain)["_optimizer_load_state_dict_post_hooks"] = collections.OrderedDict()
        plain.load_state_dict(state_dict)
        state: Any = collections.defaultdict(dict)
        for pieces in self._pieces:
            state.update(pieces.rebuild(plain.state))
        optimizer.param_groups, optimizer.state = plain.param_groups, state
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    def _plain_one(self, optimizer: Optimizer, state: dict[Any, dict[str, Any]]) -> Any:
        parameters = [group["params"] for group in optimizer.param_groups]
        return stand_in(optimizer, self._plain, parameters, collections.defaultdict(dict, state))

    # --- the buffers ----------------------------------------------------------------------------

    def _lay_out(self, optimizer: Optimizer, named: Sequence[Named], groups: Groups) -> None:
        _check_memory(named)
        numbers = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        rank = self._rule.process_set.rank()
        assert rank is not None, "others do not share"
        state: Any = collections.defaultdict(dict, optimizer.state)
        together = groups.numbers(list(named))
        for members in spread(named, numbers, bucket_mb=self._bucket_mb, together=together):
            flat = Flat(members, rank=rank, size=self._rule.size)
            pieces = Pieces(flat, self._scalars, single=self._layerwise)
            made = pieces.rebuild(optimizer.state)
            for member in flat.members:
                state.pop(member.parameter, None)
            state.update(made)
            self._buckets.append(ShardBucket(flat, self._across))
            self._pieces.append(pieces)
        self._across.buckets = self._buckets
        optimizer.state = state


def _has_gradient(member: Member) -> bool:
    return member.parameter.grad is not None


def _moves(bucket: ShardBucket) -> bool:
    return any(parameter.requires_grad or parameter.grad is not None for parameter in bucket.parameters)


def _check_memory(named: Sequence[Named]) -> None:
    """Refuse parameters that are parts of each other: they could not all become views of one buffer."""
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size(), name)
        for name, parameter in named
        if parameter.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise GradientError(
                f"{name} and {other} are two parameters with the same memory, which shard='optimizer' would "
                "part.",
                fix="Use one torch.nn.Parameter in both places, or leave out shard='optimizer'.",
            )

"""What ``grad`` is while an optimizer is sharded: an average over the ranks, of which each holds a part.

It goes through the places where plain scripts touch gradients between ``backward()`` and ``step()``: norms
are those of the whole (one small message for all parameters), so ``torch.nn.utils.clip_grad_norm_`` is
exact; changes in place by numbers or by whole tensors reach this rank's part; a ``GradScaler`` finds
infinities that any rank has. Everything else is refused, since it would see a part and take it for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hora.core.errors import GradientError

if TYPE_CHECKING:
    from hora.torch.shard._flat import Member

__all__ = ["GradientShare", "Holder", "whole"]


class Holder(Protocol):
    """Keeps the averages of a buffer."""

    def part(self, member: Member) -> torch.Tensor:
        """This rank's part of a parameter's average, as a row; it may be empty."""
        ...

    def bounds(self, member: Member) -> tuple[int, int]:
        """Which elements of the parameter that part is."""
        ...

    def norm(self, member: Member, order: float) -> torch.Tensor:
        """The norm of the whole, the same on every rank."""
        ...

    def changed(self) -> None:
        """A part was changed."""
        ...

    def largest(self, value: torch.Tensor) -> None:
        """Replace a number by the largest of all ranks."""
        ...

    def gather(self, member: Member) -> torch.Tensor:
        """The whole, on every rank."""
        ...


class GradientShare(torch.Tensor):
    """The averaged gradient of one parameter.

    Attributes:
        holder: who has the average.
        member: the parameter's place there.
        pending: gradients of later backward passes, which are this rank's alone and not averaged yet.
    """

    holder: Holder
    member: Member
    pending: torch.Tensor | None

    @staticmethod
    def __new__(cls, holder: Holder, member: Member) -> GradientShare:
        like = member.parameter
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=member.stride, dtype=like.dtype, device=like.device
        )
        made.holder, made.member, made.pending = holder, member, None
        return made  # type: ignore[no-any-return]

    @property
    def part(self) -> torch.Tensor:
        """This rank's part of it, as a row; it may be empty."""
        return self.holder.part(self.member)

    def full_tensor(self) -> torch.Tensor:
        """The whole average as a plain tensor; every rank calls it."""
        return self.holder.gather(self.member)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.holder.bounds(self.member)
        return (
            f"GradientShare(elements {start} to {stop} of {self.member.name}, shape {tuple(self.shape)}, "
            f"{self.dtype})"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _IN_PLACE and isinstance(args[0], GradientShare):
            return _change(func, args, kwargs)
        handler = _HANDLERS.get(name)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        if result is NotImplemented:
            raise _refusal(name, args)
        return result


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor; for one in shares every rank calls it."""
    return gradient.full_tensor() if isinstance(gradient, GradientShare) else gradient


_IN_PLACE = frozenset(
    {"add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "neg_", "zero_", "fill_", "copy_"}
    | {"clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "masked_fill_", "sign_", "sgn_"}
)
"""Changes of each element by itself."""


def _change(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GradientShare:
    share: GradientShare = args[0]
    # Autograd adds up like this, and what it adds is not averaged yet. It is the engine's own: no copy.
    if func is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
        share.pending = args[1] if share.pending is None else share.pending + args[1]
        return share
    part = share.part
    func(part, *(_part_of(value, share) for value in args[1:]), **kwargs)
    if func._schema.name == "aten::zero_":
        share.pending = None
    share.holder.changed()
    return share


def _part_of(value: Any, share: GradientShare) -> Any:
    """What belongs to this rank's part of an argument."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, GradientShare):
        same = value.member.start == share.member.start and value.holder is share.holder
        if not same:
            raise _refusal("an operation with the gradient of another parameter", [share])
        return value.part
    start, stop = share.holder.bounds(share.member)
    return share.member.line(value.expand(share.shape))[start:stop]


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    order, dim, keep, dtype = _arguments(
        args, kwargs, names=("ord", "dim", "keepdim", "dtype"), defaults=(2, None, False, None)
    )
    if dim is not None or keep:
        return NotImplemented
    norm = args[0].holder.norm(args[0].member, float(order))
    return norm if dtype is None else norm.to(dtype)


def _norms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    order, dtype = _arguments(args, kwargs, names=("ord", "dtype"), defaults=(2, None))
    norms = [
        gradient.holder.norm(gradient.member, float(order))
        if isinstance(gradient, GradientShare)
        else torch.linalg.vector_norm(gradient, order)
        for gradient in args[0]
    ]
    return norms if dtype is None else [norm.to(dtype) for norm in norms]


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    gradients, found, factor = args
    shares = [gradient for gradient in gradients if isinstance(gradient, GradientShare)]
    parts = [gradient.part if isinstance(gradient, GradientShare) else gradient for gradient in gradients]
    parts = [part for part in parts if part.numel()]
    if parts:
        func(parts, found, factor)
    for share in shares:
        share.holder.changed()
    shares[0].holder.largest(found)


def _each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A change of a list of gradients, in place."""
    single = getattr(torch.Tensor, func._schema.name.removeprefix("aten::_foreach_"))
    gradients, *others = args
    for place, gradient in enumerate(gradients):
        single(gradient, *(other[place] if isinstance(other, list | tuple) else other for other in others))


def _alias(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GradientShare:
    return GradientShare(args[0].holder, args[0].member)


_HANDLERS: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "detach": _alias,
    **{
        f"_foreach_{name}": _each
        for name in ("add_", "sub_", "mul_", "div_", "neg_", "zero_", "clamp_min_", "clamp_max_")
    },
}


def _arguments(
    args: Sequence[Any], kwargs: dict[str, Any], *, names: Sequence[str], defaults: Sequence[Any]
) -> list[Any]:
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    return [given.get(name, default) for name, default in zip(names, defaults, strict=True)]


def _refusal(name: str, args: Sequence[Any]) -> GradientError:
    share = next((value for value in args if isinstance(value, GradientShare)), None)
    of = "a gradient" if share is None else f"the gradient of {share.member.name}"
    return GradientError(
        f"{name} was called on {of}, of which this rank holds only a part: the optimizer is sharded "
        "(shard='optimizer').",
        fix="Write whole = parameter.grad.full_tensor() on every rank. Norms, clipping and changes in place "
        "need no such line.",
    )

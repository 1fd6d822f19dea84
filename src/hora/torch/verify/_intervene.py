"""Looks into single operations of a recorded training, and changes them where an experiment wants that.

A ``TorchFunctionMode`` sees every function of PyTorch that the script and its modules call, however they
imported it. From it come the counts that means were divided by, the cuts that batches are made of, and
what the experiments replace: batch norm, dropout, random numbers, the weights of means, float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hora.torch.verify._intervene_batch_norm import shared_batch_norm
from hora.torch.verify._intervene_random import (
    DRAWS,
    DROPOUTS,
    States,
    drops,
    keyed_rows,
    seed_of,
    without_dropout,
)
from hora.torch.verify._record_prints import tensors

if TYPE_CHECKING:
    from hora.torch.verify._record import Recorder

__all__ = ["Watch", "group"]

_LOSSES: frozenset[Any] = frozenset(
    getattr(F, name)
    for name in (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss"),
        *("poisson_nll_loss", "hinge_embedding_loss", "soft_margin_loss", "multilabel_soft_margin_loss"),
    )
)
_MEANS: frozenset[Any] = frozenset({torch.mean, torch.Tensor.mean})
_DIVISIONS: frozenset[Any] = frozenset(
    {torch.div, torch.true_divide, torch.divide}
    | {getattr(torch.Tensor, name) for name in ("div", "div_", "divide", "true_divide", "__truediv__")}
)
_CUTS: frozenset[Any] = frozenset(
    {torch.index_select, torch.narrow, torch.stack, torch.tensor, torch.as_tensor}
    | {torch.Tensor.index_select, torch.Tensor.narrow}
)
_MAKERS: frozenset[Any] = frozenset({torch.randn, torch.rand, torch.randint})
_NARROWING = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

_group: Any = None


def group() -> Any:
    """A group of all ranks for what experiments exchange, so that it never meets the script's messages."""
    global _group
    if _group is None:
        _group = dist.new_group(backend="gloo")
    return _group


class Watch(TorchFunctionMode):
    """The mode of one rank.

    Attributes:
        counts: what each mean of this backward pass was divided by.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._apply = frozenset(recorder.plan.apply)
        self._states = States()
        self._keyed = False
        self._draws = 0
        self.counts: list[float] = []

    def start(self) -> None:
        """Stay in force until the script ends."""
        enter: Any = self.__enter__
        enter()
        if "clipping" in self._apply:
            clip: Any = torch.nn.utils.clip_grad
            clip._clip_grads_with_norm_ = _do_nothing
            torch.nn.utils.clip_grad_value_ = clip.clip_grad_value_ = _do_nothing
        else:
            self._see_clipping()

    def new_pass(self) -> None:
        """A backward pass has ended."""
        self.counts.clear()
        self._draws = 0
        if self._keyed:
            self._keyed = False
            self._states.restore()

    def new_step(self) -> None:
        self.new_pass()

    def batch_given(self) -> None:
        """From here on, what is drawn belongs to the batch."""
        if "randomness" in self._apply and not self._keyed:
            self._keyed = True
            self._states.put_aside(seed_of("pass", self._recorder.steps, self._recorder.passes))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if not recorder.active:
            return function(*args, **kwargs)
        if recorder.plan.float64:
            function, args, kwargs = _widened(function, args, kwargs)
        if function is torch.Tensor.__getitem__:
            result = function(*args, **kwargs)
            return recorder.sources.cut(result) if _selects(args[1]) else result
        if function in DROPOUTS:
            if not drops(function, args, kwargs):
                return function(*args, **kwargs)
            recorder.uses.add("dropout")
            plain = without_dropout if "randomness" in self._apply else _called
            return plain(function, args, kwargs)
        if function is F.batch_norm and _training(args, kwargs):
            recorder.uses.add("batch norm")
            if "batch-norm" in self._apply and recorder.size > 1:
                return shared_batch_norm(group(), *args, **kwargs)
        elif function in DRAWS and self._keyed:
            return self._drawn(function, args, kwargs)
        elif (function in _MAKERS and not recorder.sources.pending) or function in _CUTS:
            return recorder.sources.cut(function(*args, **kwargs))
        elif torch.is_grad_enabled() and (
            function in _LOSSES or function in _MEANS or function in _DIVISIONS
        ):
            return self._mean(function, args, kwargs)
        return function(*args, **kwargs)

    def widen(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module, and what it is called with, in float64."""
        if any(value.dtype in _NARROW for value in (*module.parameters(), *module.buffers())):
            module.double()
        return _wide(args), _wide(kwargs)

    def _mean(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that may be the mean, or the division, by which a loss becomes one number."""
        before = args[0] if args else None
        shape = before.numel() if isinstance(before, torch.Tensor) else 0
        result = function(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or not result.requires_grad or result.numel() != 1:
            return result
        with torch._C.DisableTorchFunction():
            count = _count(function, shape, args, kwargs)
        if count is None:
            return result
        place = len(self.counts)
        self.counts.append(count)
        if "weighting" not in self._apply:
            return result
        recorder = self._recorder
        try:
            weight = recorder.plan.weights[recorder.rank][recorder.steps][recorder.passes][place]
        except IndexError:  # behind what the first run has recorded
            return result
        return result if weight == 1.0 else result * weight

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self._draws += 1
        with torch._C.DisableTorchFunction():
            keys = self._recorder.sources.keys(len(result)) if result.dim() else None
            if keys is not None:
                turn = (self._recorder.steps, self._draws)
                keyed_rows(result.detach(), keys, DRAWS[function](args, kwargs), turn=turn)
        return result

    def _see_clipping(self) -> None:
        clip: Any = torch.nn.utils.clip_grad
        clip._clip_grads_with_norm_ = self._seen(clip._clip_grads_with_norm_)
        torch.nn.utils.clip_grad_value_ = clip.clip_grad_value_ = self._seen(clip.clip_grad_value_)

    def _seen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(*args: Any, **kwargs: Any) -> Any:
            self._recorder.uses.add("clipping")
            return original(*args, **kwargs)

        return clipped


def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _selects(index: Any) -> bool:
    """Whether an index takes some of the rows, rather than one of them or all."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first != slice(None)
    if isinstance(first, torch.Tensor):
        return first.dim() > 0
    return isinstance(first, list | range) or getattr(first, "ndim", 0) > 0


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False))


def _count(function: Any, elements: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """What the function divided by; None when it made no mean."""
    if function in _MEANS:
        return float(elements)
    if function in _DIVISIONS:
        by = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(by, torch.Tensor):
            return None if by.requires_grad or by.numel() != 1 else float(by)
        return float(by) if isinstance(by, int | float) else None
    reduction = kwargs.get("reduction", "mean")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if reduction == "batchmean":
        return float(len(args[0]))
    if reduction != "mean" or not isinstance(target, torch.Tensor):
        return None
    if function in (F.cross_entropy, F.nll_loss):
        if target.is_floating_point():
            return float(target.numel() // args[0].shape[1])
        kept = target[target != kwargs.get("ignore_index", -100)]
        weight = kwargs.get("weight")
        return float(kept.numel()) if weight is None else float(weight[kept].sum())
    return float(max(elements, target.numel()))


def _widened(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same call in float64."""
    if sys._getframe(2).f_code.co_filename.endswith("grad_scaler.py"):
        return function, args, kwargs  # its scale has to be float32
    function = _NARROWING.get(function, function)
    if kwargs.get("dtype") in _NARROW:
        kwargs = kwargs | {"dtype": torch.float64}
    if function in (torch.Tensor.to, torch.Tensor.type):
        args = tuple(
            torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value for value in args
        )
    kinds = {value.dtype for value in tensors([*args, *kwargs.values()]) if value.is_floating_point()}
    in_place = getattr(function, "__name__", "").endswith("_")
    if torch.float64 in kinds and len(kinds) > 1 and not in_place:
        return function, _wide(args), _wide(kwargs)
    return function, args, kwargs


def _wide(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.dtype in _NARROW else tree
    if type(tree) is dict:
        return {key: _wide(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_wide(value) for value in tree)
    return tree

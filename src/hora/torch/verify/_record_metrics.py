"""The numbers that a script reduces over its ranks, which ``hora verify`` compares too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import hora.torch as hora
from hora.torch import _collectives, _context, _metrics
from hora.torch import horovod as horovod_face
from hora.torch.shard._gradient import GradientShare
from hora.torch.verify._intervene import group
from hora.torch.verify._record_sources import user_place

if TYPE_CHECKING:
    from hora.torch.verify._record import Recorder

__all__ = ["Metrics"]

SUMMED = " (sum)"
"""Behind the place of a sum, which the script may yet divide by the number of workers."""

MOST = 4
"""Elements of a tensor that may be a metric; larger ones are gradients or parameters."""


class Metrics:
    """Follows the reductions of numbers on one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._weighted = "metric-weights" in recorder.plan.apply
        self._found: list[tuple[str, float, int]] = []
        self._seen = 0
        self._called = 0
        self._batch = 0
        self._reduced = False
        self._plain_all_reduce = dist.all_reduce

    def saw(self, samples: int) -> None:
        """A model was called without gradients."""
        self._seen = samples if self._reduced else self._seen + samples
        self._reduced = False

    def trained(self, samples: int) -> None:
        """A backward pass begins."""
        self._seen, self._called, self._batch = 0, 0, samples

    def called(self, samples: int) -> None:
        """A model was called with gradients: for training, or for an evaluation without ``no_grad``."""
        self._called = samples if self._reduced else self._called + samples
        self._reduced = False

    def start(self) -> None:
        """Follow ``hora.mean``, ``allreduce`` in all its interfaces, and ``torch.distributed.all_reduce``."""
        mean = self._mean(_metrics.mean)
        allreduce = self._allreduce(_collectives.allreduce)
        replaced: Any = hora
        replaced.mean, replaced.allreduce = mean, allreduce
        of_horovod: Any = horovod_face
        of_horovod.allreduce = self._allreduce(of_horovod.allreduce)
        of_torch: Any = dist
        of_torch.all_reduce = self._all_reduce(dist.all_reduce)

    def take(self) -> list[tuple[str, float, int]]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found

    def _mean(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mean(value: Any, weight: Any = 1.0) -> Any:
            place, samples = user_place(), self._samples()
            result = original(value, samples if self._weighted and place is not None else weight)
            if place is not None:
                values = result if isinstance(result, Mapping) else {"": result}
                for name in sorted(values):
                    self._note(f"{place} {name}".strip(), values[name], samples)
            return result

        return mean

    def _allreduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def allreduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            place = user_place()
            if place is None or not self._is_metric(tensor):
                return original(tensor, *args, **kwargs)
            samples = self._samples()
            if self._weighted:
                tensor = tensor * self._share(samples)
            result = original(tensor, *args, **kwargs)
            summed = kwargs.get("op") is _collectives.Sum or kwargs.get("average") is False
            for value in result.detach().reshape(-1).tolist():
                self._note(place + SUMMED * summed, value, samples)
            return result

        return allreduce

    def _all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            place = user_place()
            if place is None or not self._is_metric(tensor) or kwargs.get("async_op"):
                return original(tensor, *args, **kwargs)
            samples = self._samples()
            if self._weighted:
                tensor.mul_(self._share(samples))
            work = original(tensor, *args, **kwargs)
            summed = (args[0] if args else kwargs.get("op", dist.ReduceOp.SUM)) == dist.ReduceOp.SUM
            for value in tensor.detach().reshape(-1).tolist():
                self._note(place + SUMMED * summed, value, samples)
            return work

        return all_reduce

    def _share(self, samples: int) -> float:
        """This rank's samples over the mean of all ranks': the factor that makes a mean of means right."""
        context = _context.required("allreduce")
        wire = torch.tensor([float(samples)], dtype=torch.float64)
        if context.world.size > 1:
            self._plain_all_reduce(wire, group=group())
        total = float(wire)
        return samples * context.world.size / total if total else 1.0

    def _samples(self) -> int:
        """What the number is a mean of: the evaluation's samples since the last one, else the last batch."""
        return self._seen or self._called or self._batch

    def _is_metric(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or not 0 < tensor.numel() <= MOST:
            return False
        gradients = {
            parameter.grad.data_ptr()
            for root in self._recorder.roots
            for parameter in root.parameters()
            if parameter.grad is not None and not isinstance(parameter.grad, GradientShare)
        }
        return tensor.is_floating_point() and tensor.data_ptr() not in gradients

    def _note(self, place: str, value: float, samples: int) -> None:
        self._reduced = True
        self._found.append((place, float(value), samples))

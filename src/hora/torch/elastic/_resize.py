"""What happens to the global batch and the learning rate when the number of workers changes.

``keep``: the global batch and the learning rate stay. ``scale``: each worker's batch stays, and the learning
rate follows the global batch linearly (Goyal et al., arXiv:1706.02677, section 2.1).

The learning rate is multiplied for the length of ``step()`` and put back after it. So schedules of any kind
see what they have set, and a state that is saved is that of the number of workers that the job began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from hora.adapter.order import share
from hora.core.errors import UsageError
from hora.core.plural import plural
from hora.torch._loader import Loader

__all__ = ["Resize", "Rule", "loaders_of"]

Rule = Literal["keep", "scale"]


class Resize:
    """The rule of one state.

    Args:
        rule: ``"keep"`` or ``"scale"``.

    Attributes:
        factor: by which the learning rates are multiplied now.

    Raises:
        UsageError: another rule.
    """

    def __init__(self, rule: Rule) -> None:
        if rule not in ("keep", "scale"):
            raise UsageError(
                f"resize={rule!r} is not known.",
                fix='Write resize="keep": the global batch stays; or resize="scale": each worker\'s batch '
                "stays, and the learning rate follows the global batch.",
            )
        self._rule = rule
        self._first: tuple[int, dict[str, int]] | None = None  # workers and global batches at the start
        self._before: list[tuple[dict[str, Any], Any]] = []
        self.factor = 1.0

    def watch(self, optimizer: Optimizer) -> None:
        """Multiply this optimizer's learning rates in each step."""
        if self._rule == "keep":
            return
        handle = optimizer.register_step_pre_hook(self._multiply)
        # In front of what makes a sharded step of it, which copies the learning rates.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        optimizer.register_step_post_hook(self._put_back)

    def told(self, loaders: Mapping[str, Loader], size: int) -> dict[str, Any]:
        """What others have to know: of the start, and where the loaders are."""
        if self._first is None:
            self._first = size, {name: loader.global_batch for name, loader in loaders.items()}
        return {
            "first": self._first,
            "loaders": {name: (loader.global_batch, loader.since) for name, loader in loaders.items()},
        }

    def apply(self, told: Mapping[str, Any], loaders: Mapping[str, Loader], size: int) -> None:
        """There are ``size`` workers now.

        Raises:
            GlobalBatchError: the data set is too small for so many.
        """
        self._first = first, batches = told["first"]
        for name, loader in loaders.items():
            if name in told["loaders"]:
                now, since = told["loaders"][name]
                loader.resize(now)
                loader.since = since
                wanted = batches[name]
                loader.resize(wanted if self._rule == "keep" else max(round(wanted * size / first), 1))
        self.factor = 1.0 if self._rule == "keep" else size / first

    def text(self, loader: Loader | None, size: int) -> str:
        """The rule in plain words, for this number of workers."""
        workers = f"{size} {plural(size, 'worker')}"
        if loader is None:
            kept = (
                "the learning rate stays" if self.factor == 1.0 else f"the learning rate is {self._times()}"
            )
            return f"{workers}: {kept}"
        batch = loader.global_batch
        counts = sorted({_length(share(0, batch, rank=rank, size=size)) for rank in range(size)})
        shares = " or ".join(map(str, counts)) + f" {plural(counts[-1], 'sample')}" + " each" * (size > 1)
        if len(counts) > 1:
            shares += ", weighted by their numbers"
        if loader.micro_batch is not None and counts[-1] > loader.micro_batch:
            shares += f", in micro-batches of at most {loader.micro_batch}"
        if self._rule == "keep":
            return f"{workers}: global batch {batch} and learning rate are kept; {shares}"
        rate = "the learning rate is that of the script" if self.factor == 1.0 else self._times()
        return f"{workers}: {shares}, global batch {batch}; {rate}"

    def _times(self) -> str:
        assert self._first is not None, "apply() came before"
        first = self._first[0]
        return f"learning rate times {self.factor:g}, as it was set for {first} {plural(first, 'worker')}"

    def _multiply(self, optimizer: Optimizer, *_: Any) -> None:
        self._put_back()  # where a step has failed
        if self.factor == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):  # its identity counts, for compiled steps
                self._before.append((group, rate.clone()))
                rate.mul_(self.factor)
            else:
                self._before.append((group, rate))
                group["lr"] = rate * self.factor

    def _put_back(self, *_: Any) -> None:
        for group, rate in self._before:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._before.clear()


def loaders_of(parts: Mapping[str, Any]) -> dict[str, Loader]:
    """The loaders among the parts of a state."""
    return {name: part for name, part in parts.items() if isinstance(part, Loader)}


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]

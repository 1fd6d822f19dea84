"""What a study of the global batch trains: every method with every global batch, from every seed.

Imports no framework, so that the command line can check a plan before a worker starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.core.errors import GlobalBatchError, UsageError
from hora.workloads.resnet.config import PROFILES, OptimizerConfig

__all__ = ["METHODS", "QUICK", "Cell", "Method", "Plan"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the optimizer's numbers follow from the global batch.

    Attributes:
        title: in tables and plots.
        optimizer: which of the profile's.
        rule: how the peak learning rate grows with the global batch.
        warmup: whether the learning rate warms up.
    """

    title: str
    optimizer: str
    rule: str
    warmup: bool

    def rate(self, base: float, growth: float) -> float:
        """The peak learning rate for a global batch that is ``growth`` times the profile's."""
        return base * {"fixed": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[self.rule]


METHODS = {
    "fixed": Method(title="SGD, rate as it was", optimizer="sgd", rule="fixed", warmup=False),
    "linear": Method(title="SGD, linear rule", optimizer="sgd", rule="linear", warmup=False),
    "warmup": Method(title="SGD, linear rule, warm-up", optimizer="sgd", rule="linear", warmup=True),
    "lars": Method(title="LARS, square-root rule, warm-up", optimizer="lars", rule="sqrt", warmup=True),
}
"""The lesson of P. Goyal et al., arXiv:1706.02677 (linear rule and warm-up) and of Y. You et al.,
arXiv:1708.03888 (LARS)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training of the grid."""

    method: str
    batch: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The grid, and what all of its trainings share.

    The amount of data is the same for each: ``epochs``. A large global batch is computed in micro-batches of
    ``micro_batch``, the profile's own global batch, so that batch normalization sees as many samples as
    it would on as many workers, each with its micro-batch.

    Attributes:
        profile: of the ResNet workload: data, model, rates at its own global batch.
        data: directory of the images; None: wherever they are found.
        batches: global batches, ascending.
        width: channels of the model's first stage; None: the profile's own.
    """

    profile: str = "quick"
    data: str | None = None
    epochs: int = 10
    batches: tuple[int, ...] = (128, 512, 1024, 2048)
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: tuple[int, ...] = (1,)
    width: int | None = None
    warmup_epochs: float = 2.0

    def check(self, samples: int, *, workers: int) -> None:
        """Find what cannot work before anything is trained.

        Raises:
            UsageError: an empty grid, an unknown method, or a number out of its range.
            GlobalBatchError: a global batch that does not fit the workers or the data.
        """
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise UsageError(
                f"There is no method {unknown[0]!r}.", fix=f"Choose from {', '.join(METHODS)} with --methods."
            )
        for flag, values in (("batches", self.batches), ("methods", self.methods), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise UsageError(
                    f"--{flag} {','.join(map(str, values))} is empty, or has something twice.",
                    fix=f"Leave out --{flag}, or give each once.",
                )
        if self.epochs < 1 or not 0 <= self.warmup_epochs < self.epochs:
            raise UsageError(
                f"A warm-up of {self.warmup_epochs:g} epochs does not fit {self.epochs}.",
                fix="Give more --epochs, or fewer --warmup-epochs.",
            )
        for batch in self.batches:
            if batch < 1 or batch > samples or batch % workers:
                raise GlobalBatchError(
                    f"A global batch of {batch} does not fit {samples} training images on {workers} workers.",
                    fix="Give multiples of the number of workers, up to that of images, with --batches.",
                )

    @property
    def base_batch(self) -> int:
        """The global batch that the profile's rates are made for."""
        return PROFILES[self.profile].global_batch

    @property
    def micro_batch(self) -> int:
        """Samples that are computed on at a time."""
        return self.base_batch

    def cells(self) -> list[Cell]:
        """All trainings, those of the first seed first."""
        return [
            Cell(method=method, batch=batch, seed=seed)
            for seed in self.seeds
            for batch in sorted(self.batches)
            for method in self.methods
        ]

    def optimizer(self, cell: Cell) -> OptimizerConfig:
        """The optimizer of a cell: the profile's, with the method's peak rate and warm-up."""
        method = METHODS[cell.method]
        options = PROFILES[self.profile].optimizers
        own = next(config for config in options if config.name == method.optimizer)
        return dataclasses.replace(
            own,
            lr=method.rate(own.lr, cell.batch / self.base_batch),
            warmup_epochs=self.warmup_epochs if method.warmup else 0.0,
        )

    def equal(self, cell: Cell, others: Sequence[Cell]) -> Cell | None:
        """One of these whose training is the same: at the smallest global batch no rule changes a thing."""
        return next(
            (
                other
                for other in others
                if (other.batch, other.seed) == (cell.batch, cell.seed)
                and self.optimizer(other) == self.optimizer(cell)
            ),
            None,
        )

    def as_json(self) -> dict[str, Any]:
        """For ``study.json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """What :meth:`as_json` wrote."""
        found: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**found)


QUICK = Plan(epochs=2, batches=(128, 1024), methods=("linear", "warmup", "lars"), width=4, warmup_epochs=1.0)
"""In a minute: to see whether all works. Its accuracies say little."""

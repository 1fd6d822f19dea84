"""What ``DistributedOptimizer`` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hora.core.errors import GradientError
from hora.keras._backend import api

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """How gradients are combined over the ranks.

    Attributes:
        name: of the reduction, in the timeline and in messages.
        op: ``Average``, ``Sum`` or ``Adasum``.
        compression: how gradients travel.
        predivide: an average divides by it before the sum, and multiplies by it after.
        passes: backward passes that add up before the ranks' gradients are combined.
        average_passes: whether those make a mean; else a sum.
        sparse_as_dense: whether gradients of a few rows travel as whole tensors.
        process_set: the ranks that take part.
        local_layers: layers whose gradients stay on their rank.
        scale_local: whether those are divided by the number of ranks.
    """

    name: str | None = None
    op: Any = None
    compression: Any = None
    predivide: float = 1.0
    passes: int = 1
    average_passes: bool = True
    sparse_as_dense: bool = False
    process_set: Any = None
    local_layers: Sequence[Any] = field(default=())
    scale_local: bool = True

    def __post_init__(self) -> None:
        if self.op not in (api.Average, api.Sum, api.Adasum):
            raise GradientError(
                f"DistributedOptimizer combines ranks by Average, Sum or Adasum, not by {self.op!r}.",
                fix="Write op=hora.Average, or leave it out.",
            )
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or self.passes < 1:
            raise GradientError(
                f"backward_passes_per_step={self.passes!r} is not a whole number of 1 or more.",
                fix="Give the number of batches whose gradients make one step.",
            )
        if not self.predivide > 0 or (self.predivide != 1 and self.op is not api.Average):
            raise GradientError(
                f"gradient_predivide_factor={self.predivide!r} goes with op=Average, and is above 0.",
                fix="Leave it out.",
            )
        if self.process_set.included() is None:
            raise GradientError(
                f"DistributedOptimizer: {self.process_set} was not added, or was removed.",
                fix="Call hora.init() first, and hora.add_process_set(process_set) on every rank.",
            )

    def is_local(self) -> set[int]:
        """Identities of the variables whose gradients stay on their rank."""
        return {id(variable) for layer in self.local_layers for variable in layer.trainable_variables}

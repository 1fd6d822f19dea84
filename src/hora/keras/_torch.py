"""Keras on PyTorch: gradients travel by ``hora.torch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import hora.torch as hora
from hora.adapter.training import Training
from hora.core.errors import WorldChangedError
from hora.torch.elastic._run import going_on

__all__ = ["State", "as_one", "native", "reduce", "run", "train_function"]


@torch.no_grad()
def reduce(
    gradients: Sequence[torch.Tensor | None],
    variables: Sequence[Any],
    *,
    op: Any,
    compression: Any,
    prescale: float,
    postscale: float,
    sparse_as_dense: bool,
    process_set: Any,
    name: str | None,
    scaled: bool,
) -> list[torch.Tensor | None]:
    """One message for each dtype. PyTorch's graph may differ from rank to rank, so who has a gradient goes
    along.
    """
    given = [
        torch.zeros_like(variable.value) if gradient is None else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    if sparse_as_dense:
        given = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in given]
    training = _look(given, variables, process_set, scaled=scaled)
    present = torch.tensor(
        [gradient is not None for gradient in gradients], dtype=torch.float32, device=given[0].device
    )
    *reduced, had = hora.grouped_allreduce(
        [*given, present],
        name=name or "gradients",
        op=op,
        compression=compression,
        prescale_factor=prescale,
        postscale_factor=postscale,
        process_set=process_set,
    )
    if training is not None:
        training.stepped()
    return [gradient if some else None for gradient, some in zip(reduced, (had > 0).tolist(), strict=True)]


_trainings: dict[tuple[int, ...], Training] = {}


def _look(
    gradients: Sequence[torch.Tensor], variables: Sequence[Any], process_set: Any, *, scaled: bool
) -> Training | None:
    """Tell the guard of this rank's own gradients; the training, if there is a guard."""
    watch = hora.context().watch
    if watch is None:
        return None
    watch.plan.elsewhere()
    training = watch.outer
    if training is None:
        key = (id(watch), *map(id, variables))
        training = _trainings.get(key)
        if training is None:
            training = _trainings[key] = Training(
                watch,
                "gradients",
                members=process_set.members,
                names=[each.path for each in variables],
                shapes=[(each.dtype, each.shape) for each in variables],
            )
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    sums = torch.stack([gradient.sum(dtype=torch.float32) for gradient in dense]).tolist()
    parts = [lambda each=each: each.float().cpu().numpy() for each in dense]
    named = list(zip([each.path for each in variables], parts, strict=True))
    training.averages(sums, [] if scaled else named, where=None)
    return training


def as_one() -> bool:
    """Whether ranks that do not take part run the same program nevertheless."""
    return False


def native(value: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor, of the same dtype."""
    return torch.from_numpy(np.array(value, copy=True))


def train_function(model: Any, *, force: bool) -> bool:
    """Keras makes it, as Python. ``torch.compile`` has to leave the engine's part alone."""
    global reduce
    if model.jit_compile:
        reduce = torch.compiler.disable(reduce)  # type: ignore[no-untyped-call]
    return False


State = hora.elastic.ObjectState


def run(function: Any) -> Any:
    """Make a training function go on after a failure: it begins where its state was committed last.

    With ``hora run --restarts`` the job starts anew. With ``--min-workers`` the workers that live go on, in
    the same processes.

    Args:
        function: takes the state, such as :class:`KerasState`, and what else the caller gives.

    Returns:
        The function to call; it returns what ``function`` returns.
    """
    from hora.keras import _context

    return going_on(function, leave=_context.shutdown, join=_context.init, interrupts=(WorldChangedError,))

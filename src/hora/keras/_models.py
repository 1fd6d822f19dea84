"""``load_model``: a model from a file, with an optimizer that is distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hora.keras._backend import api
from hora.keras._optimizer import Distributed, DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = api.Compression.none,
    *,
    compile: bool = True,  # noqa: A002 - Keras's word
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """A saved model, compiled with its optimizer and that one's state, to go on training on all ranks.

    The file may come from a model that was distributed or from a plain one: they do not differ. Every rank
    reads it; where only rank 0 can, the others make the same model, and
    ``BroadcastGlobalVariablesCallback(0)`` gives them its state.

    Args:
        filepath: what ``model.save`` wrote: a ``.keras`` or ``.h5`` file.
        custom_optimizers: classes of optimizers of your own that the file may name.
        custom_objects: by name, whatever else of your own it names.
        compression: how gradients travel, as for ``DistributedOptimizer``.
        compile: False: the model alone.
        safe_mode: False lets the file run code of its own (lambdas).
        options: other arguments of ``DistributedOptimizer``.

    Returns:
        The model.
    """
    own = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=own, compile=compile, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, Distributed):
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model

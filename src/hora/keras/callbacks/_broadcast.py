"""All ranks begin with the model of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hora.core.errors import UsageError
from hora.keras._backend import api
from hora.keras._variables import broadcast_global_variables

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Give all ranks the weights, statistics and optimizer state of one, before the first step.

    Without it, each rank trains from weights of its own. A model that is restored on ``root_rank`` alone is
    spread by it too. States of random generators are left alone.

    Args:
        root_rank: whose values all ranks get.
        device: as in Horovod; no effect.
        local_variables: variables that stay as they are on each rank.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Sequence[Any] = ()) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = list(local_variables)
        self.broadcast_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Before the first step. In ``fit`` the model has its variables by now."""
        if self.broadcast_done:
            return
        if not self.model.built:
            raise UsageError(
                f"The model {self.model.name!r} has no variables yet that could be broadcast.",
                fix="Call hora.keras.init() before fit; before a loop of your own, model.build(input_shape).",
            )
        if api.size() > 1:
            broadcast_global_variables(self.root_rank, model=self.model, local_variables=self.local_variables)
        self.broadcast_done = True

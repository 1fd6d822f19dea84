"""What a distributed optimizer does about its state, which may be spread over the ranks."""

from __future__ import annotations

import copyreg
from typing import Any, cast

from hora.core.errors import GradientError
from hora.torch.shard._fully import gathered, shared_out

__all__ = ["SpreadState"]


class SpreadState:
    """Methods that every distributed optimizer has on top of those of its class."""

    _hora: Any

    def state_dict(self, *, root_rank: int | None = None) -> dict[str, Any]:
        """As in ``torch.optim.Optimizer``, whatever ``shard`` is.

        Where the state is spread over the ranks every rank calls it, and gets all of it; with
        ``root_rank`` that rank alone, and the others an empty state.
        """
        attachment, plain = self._hora, cast("Any", super())
        keep = root_rank is None or root_rank == attachment.context.world.rank
        if attachment.shards is not None:
            return attachment.shards.whole(self, keep=keep).state_dict()  # type: ignore[no-any-return]
        own: dict[str, Any] = plain.state_dict()
        return gathered(own, keep=keep) if attachment.fully else own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim.Optimizer``; every rank gives the whole state, of any number of ranks."""
        attachment, plain = self._hora, cast("Any", super())
        if attachment.shards is not None:
            attachment.shards.load(self, state_dict)
            if attachment.context.member is not None:
                attachment.loaded = state_dict  # the next world may share it out otherwise
            return
        if attachment.fully:
            state_dict = shared_out(state_dict, self)  # type: ignore[arg-type]
        plain.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._hora.shards is not None or self._hora.fully:
            raise GradientError(
                "An optimizer with shard= cannot be copied or pickled: each rank has a part of it.",
                fix="Write optimizer.state_dict() on every rank, and load it into another optimizer.",
            )
        # Copies and pickles are plain optimizers: their parameters are other tensors.
        plain = type(self).__bases__[1]
        return copyreg._reconstructor, (plain, object, None), self.__getstate__()  # type: ignore[attr-defined]

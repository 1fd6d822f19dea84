"""Says once which ranks have not come to a collective, where no supervisor is there to do so.

Under ``hora run`` the guard names them, with their lines (:class:`~hora.torch._observe.Calls`). Ranks that
torchrun, mpirun or srun started would wait without a word until ``HORA_TIMEOUT``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hora.core.plural import plural
from hora.torch.engines._team import Team

__all__ = ["Stalls"]

_log = logging.getLogger(__name__)


class Stalls:
    """The waits of one team.

    Args:
        team: the ranks of this host.
        after: seconds of waiting after which ranks are named; 0: never.

    Attributes:
        number: of the collective that goes on now, counted in its group from 1, the same on all ranks.
        what: that collective.
    """

    def __init__(self, team: Team, *, after: float) -> None:
        self._team, self.after = team, after
        self.number, self.what = 0, ""
        self._told = 0

    def here(self, waited: float) -> None:
        """This rank has waited so many seconds for others of its host."""
        if self._due(waited) and self._team.is_speaker():
            missing = self._team.missing()
            self._say(f"{_ranks(missing)} {plural(len(missing), 'has', many='have')} not come", waited)

    def away(self, waited: float, others: Sequence[int]) -> None:
        """This rank, its host's leader, has waited so many seconds for other hosts."""
        if self._due(waited):
            self._say(f"of {_ranks(others)}, on other hosts, not all have come", waited)

    def _due(self, waited: float) -> bool:
        return 0 < self.after <= waited and self._told != self.number

    def _say(self, who: str, waited: float) -> None:
        self._told = self.number
        _log.warning(
            "Rank %d waits in %s, collective %d of its group: %s for %.0f seconds.",
            self._team.members[self._team.index],
            self.what,
            self.number,
            who,
            waited,
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"

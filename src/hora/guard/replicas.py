"""Do all ranks still have the same model? The verdicts ``diverged`` and ``different-init``.

Ranks report fingerprints of parameters, gradients and optimizer state at the same steps. Those of an
optimizer whose gradients Hora averages must be equal. Those of another optimizer must be if the ranks show
that they work on one model, and nobody brings them together again: each rank may as well train one of its
own, or average the models now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hora.guard.causes import Difference, explain
from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Replicas"]

STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")
"""Names of the buffers of batch normalization, in PyTorch and in Keras."""

KEPT = 16
"""Fingerprints of so many steps wait for the ranks that have not reported yet."""


@dataclass
class _Group:
    """One optimizer on all its ranks."""

    members: list[int]
    starts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    prints: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    again: dict[int, dict[int, str]] = field(default_factory=dict)
    finals: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    equal: int | None = None
    """The last step after which all had the same; 0: before the first."""
    suspect: Difference | None = None
    own: bool = False
    """Each rank has a model of its own, or they are brought together by other means."""
    told: bool = False


class Replicas:
    """Compares the ranks' fingerprints."""

    kinds = frozenset({"replica", "print", "again", "final", "trouble"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._groups: dict[str, _Group] = {}

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "trouble":
            self._judge.desk.complain(
                f"the guard has a fault on rank {rank} and watches its training no more; the job goes on "
                f"({record['text']})"
            )
            return
        key = str(record["key"])
        if kind == "replica":
            group = self._groups.setdefault(key, _Group([int(member) for member in record["members"]]))
            group.starts[rank] = record
            group.calls[rank] = self._judge.board.head(rank).calls
            if len(group.members) > 1 and self._complete(group, group.starts):
                self._compare_starts(group)
            return
        known = self._groups.get(key)
        if known is None or known.own or known.told or len(known.members) < 2:
            return
        if kind == "print":
            self._take_print(known, rank, record)
        elif kind == "again":
            self._take_again(known, rank, record)
        else:
            known.finals[rank] = record

    def is_one_training(self, key: str, *, steps: int) -> bool:
        """Whether the ranks show, by their first ``steps`` steps, that they train one model together.

        Ranks may as well train one each, as the folds of a cross-validation or the members of an ensemble.
        """
        group = self._groups.get(key)
        if group is None or not self._complete(group, group.starts):
            return True
        return not group.own and (group.equal not in (None, 0) or self._is_one(group, steps))

    def tick(self, now: float) -> None:
        for group in self._groups.values():
            if not (group.own or group.told) and group.finals:
                self._end(group)

    def ended(self, rank: int) -> None:
        return

    def _complete(self, group: _Group, reports: Mapping[int, Any]) -> bool:
        return all(member in reports for member in group.members)

    # --- before the first step ------------------------------------------------------------------

    def _compare_starts(self, group: _Group) -> None:
        starts = group.starts
        distributed = any(start["distributed"] for start in starts.values())
        broadcast = all(start["broadcast"] for start in starts.values())
        if _differ(starts, "parameters"):
            if distributed or broadcast:
                self._tell(group, Difference(starts, starts, "parameters", step=0, equal=None))
            else:
                group.own = True
        elif distributed and _differ(starts, "state"):
            self._tell(group, Difference(starts, starts, "state", step=0, equal=None))
        else:
            group.equal = 0

    # --- at steps -------------------------------------------------------------------------------

    def _take_print(self, group: _Group, rank: int, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        prints = group.prints.setdefault(step, {})
        prints[rank] = record
        if not self._complete(group, prints):
            for old in sorted(group.prints)[:-KEPT]:
                del group.prints[old]
            return
        del group.prints[step]
        if not self._complete(group, group.starts):
            return
        what = next((what for what in ("parameters", "state") if _differ(prints, what)), None)
        if what is None:
            group.equal, group.suspect = step, None
            return
        difference = Difference(group.starts, prints, what, step=step, equal=group.equal)
        if any(start["distributed"] for start in group.starts.values()):
            self._tell(group, difference)
        elif group.suspect is None:
            # It may be meant: models that are averaged now and then. The next steps tell.
            group.suspect = difference
            for member in group.members:
                self._judge.desk.send(member, {"kind": "closely", "key": record["key"]})

    def _take_again(self, group: _Group, rank: int, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        seen = group.again.setdefault(step, {})
        seen[rank] = str(record["parameters"])
        if not self._complete(group, seen):
            return
        del group.again[step]
        if len(set(seen.values())) == 1:
            group.own = True
        elif record["left"] == 0 and group.suspect is not None:
            self._decide(group, group.suspect, step)

    def _decide(self, group: _Group, suspect: Difference, step: int) -> None:
        """Models that are not averaged have parted. Were they meant to be one?"""
        if self._is_one(group, step):
            self._tell(group, suspect)
        else:
            group.own = True

    def _is_one(self, group: _Group, steps: int) -> bool:
        """Whether the ranks show that they work on one model: as they began, or by meeting at every step."""
        if self._is_meant(group):
            return True
        board = self._judge.board
        return all(board.head(rank).calls - group.calls.get(rank, 0) >= steps for rank in group.members)

    def _is_meant(self, group: _Group) -> bool:
        starts = group.starts.values()
        return any(start["distributed"] for start in starts) or all(
            start["broadcast"] or start["together"] for start in starts
        )

    # --- at the end -----------------------------------------------------------------------------

    def _end(self, group: _Group) -> None:
        gone = self._judge.gone | self._judge.dead
        if not all(member in group.finals or member in gone for member in group.members):
            return
        finals = group.finals
        if group.suspect is not None:
            # The wrapper of a model may end before its training does.
            early = any(int(final["step"]) < group.suspect.step for final in finals.values())
            if early and not gone.issuperset(group.members):
                return
            if early or _differ(finals, "parameters"):
                step = max(group.suspect.step, *(int(final["step"]) for final in finals.values()))
                self._decide(group, group.suspect, step)
            return
        if len(finals) < 2 or group.equal is None or _differ(finals, "parameters"):
            return
        names = list(dict.fromkeys(name for final in finals.values() for name in final["buffers"]))
        wrong = [name for name in names if len({f["buffers"].get(name) for f in finals.values()}) > 1]
        # Meeting at every step would not do: each rank may measure a model of its own between barriers.
        if wrong and self._is_meant(group):
            group.told = True
            self._tell_buffers(group, wrong)

    def _tell_buffers(self, group: _Group, wrong: Sequence[str]) -> None:
        statistics = any(_kind(name) in STATISTICS for name in wrong)
        first = wrong[0]
        more = f" and {len(wrong) - 1} more buffers" if len(wrong) > 1 else ""
        if statistics:
            text = (
                f"The parameters are equal on all ranks, but {first}{more} are not: each rank has kept the "
                "batch-norm statistics of its own samples, so that evaluation gives another result on each "
                "rank, and a checkpoint holds the statistics of one rank only."
            )
            advice = (
                "Write model = hora.SyncBatchNorm.convert_sync_batchnorm(model) before the optimizer is "
                "made; "
                "or average the buffers over the ranks before each evaluation and checkpoint."
            )
        else:
            text = (
                f"The parameters are equal on all ranks, but {first}{more} {'are' if more else 'is'} not: "
                "each rank changes these buffers by its own samples."
            )
            advice = (
                "Average or broadcast the buffers, as with hora.broadcast_parameters(model), before they are "
                "used; or register them with persistent=False if they belong to one rank."
            )
        step = max(int(final["step"]) for final in group.finals.values())
        where = next((start["where"] for start in group.starts.values()), None)
        self._judge.find(
            Verdict(kind="diverged", text=text, advice=advice, ranks=group.members, where=where, step=step),
            key=("diverged",),
        )

    def _tell(self, group: _Group, difference: Difference) -> None:
        group.told = True
        reduction = self._judge.calls.reduction(group.members[0])
        site = None if reduction is None else reduction.site
        found = explain(replace(difference, reduction=site))
        self._judge.find(
            Verdict(
                kind=found.kind,
                text=found.text,
                advice=found.advice,
                ranks=found.ranks,
                where=found.where,
                step=difference.step,
            ),
            key=("diverged",),
        )


def _kind(name: str) -> str:
    """A buffer's own name, without those of layers: of ``norm.running_mean`` or ``norm/moving_mean (2)``."""
    return name.partition(" ")[0].replace("/", ".").rpartition(".")[2]


def _differ(records: Mapping[int, Mapping[str, Any]], what: str) -> bool:
    values = [record[what] for record in records.values()]
    return any(value != values[0] for value in values)

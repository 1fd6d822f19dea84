"""Are the gradients finite, and does every parameter get one? ``not-finite`` and ``frozen-parameters``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Gradients"]

PATIENCE = 1.0
"""Seconds in which ranks may report the same step, once one has reported a gradient that is not finite."""


@dataclass
class _Case:
    since: float | None = None
    reports: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class Gradients:
    """Judges what ranks report of their own gradients."""

    kinds = frozenset({"not-finite", "idle", "left-out"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._bad: dict[tuple[str, int], _Case] = {}
        self._idle: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._left_out: dict[str, _Case] = {}
        self._told: set[str] = set()

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        key = str(record["key"])
        if record["kind"] == "idle":
            self._idle.setdefault(key, {})[rank] = record
        elif record["kind"] == "left-out":
            self._left_out.setdefault(key, _Case()).reports[rank] = record
        elif key not in self._told:
            self._bad.setdefault((key, int(record["step"])), _Case()).reports[rank] = record

    def ended(self, rank: int) -> None:
        return

    def tick(self, now: float) -> None:
        gone = self._judge.gone | self._judge.dead
        for place in sorted(self._bad, key=lambda place: place[1]):
            case = self._bad[place]
            case.since = now if case.since is None else case.since
            members = next(iter(case.reports.values()))["members"]
            passed = all(
                rank in case.reports or rank in gone or self._judge.board.head(rank).step >= place[1]
                for rank in members
            )
            if passed or now - case.since > PATIENCE:
                del self._bad[place]
                if place[0] not in self._told:
                    self._told.add(place[0])
                    self._tell_bad(place[1], case.reports)
            else:
                self._judge.urgent = True
        for key, case in list(self._left_out.items()):
            case.since = now if case.since is None else case.since
            members = next(iter(case.reports.values()))["members"]
            if all(rank in case.reports or rank in gone for rank in members) or now - case.since > PATIENCE:
                del self._left_out[key]
                self._tell_left_out(case.reports)
        for key, reports in list(self._idle.items()):
            members = next(iter(reports.values()))["members"]
            if all(rank in reports or rank in gone for rank in members):
                del self._idle[key]
                self._tell_idle(reports)

    def _tell_bad(self, step: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        from hora.guard.judge import ranks_text

        earliest = min(int(record["order"]) for record in reports.values())
        first = {rank: record for rank, record in reports.items() if record["order"] == earliest}
        # Averaging spreads it. Where only the average was seen, the loss may tell whose it was.
        suspects = {rank: record for rank, record in first.items() if record["loss"]}
        if suspects and not all(record["own"] for record in first.values()):
            first = suspects
        ranks = sorted(first)
        record = first[ranks[0]]
        names = record["names"]
        more = f" and {record['count'] - 1} more" if record["count"] > 1 else ""
        value, where = _value(record["value"]), ranks_text(ranks)
        if names:
            what = f"At step {step} the gradient of {names[0]}{more} was {value} on {where}."
            loss = f"The loss itself was {_value(record['loss'])} there." if record["loss"] else ""
        else:
            what = f"At step {step} the loss was {value} on {where}, though the gradients were finite."
            loss = "What the step has learned from it is not what the loss means."
        spread = (
            "It was averaged with those of the other ranks, and is in all their parameters now."
            if len(record["members"]) > 1
            else "The step was taken with it, so the parameters are not finite any more."
        )
        self._judge.find(
            Verdict(
                kind="not-finite",
                text=" ".join(part for part in (what, loss, spread if names else "") if part),
                advice="Look at this step's samples on that rank, and at divisions, logarithms and square "
                "roots of 0 in "
                "the loss; a smaller learning rate, clipping, or a GradScaler for float16 help against "
                "overflow.",
                ranks=ranks,
                where=record["where"],
                step=step,
            ),
            key=("not-finite",),
        )

    def _tell_left_out(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        record = next(iter(reports.values()))
        count, names = int(record["count"]), [str(name) for name in record["names"]]
        indices = set(range(count))
        have, they = ("has", "it") if count == 1 else ("have", "they")
        self._judge.find(
            Verdict(
                kind="frozen-parameters",
                text=f"{_list(indices, dict(zip(map(str, indices), names, strict=False)))} {have} got "
                f"gradients in steps {record['since']} to {record['step']}, and no optimizer holds "
                f"{_them(indices)}: {they} will not move. A part that is added to the model, or unfrozen, "
                "after the optimizer was made is not in it.",
                advice="Make the optimizer when the model is complete, or write "
                "optimizer.add_param_group({'params': part.parameters()}). If they are to stay as they are, "
                "write parameter.requires_grad_(False), which also saves their gradients.",
                ranks=sorted(reports),
                where=record["where"],
                step=int(record["step"]),
            ),
            key=("frozen", record["key"]),  # that the part which it replaces gets no gradient follows from it
        )

    def _tell_idle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        silent = set.intersection(*(set(record["silent"]) for record in reports.values()))
        stuck = set.intersection(*(set(record["stuck"]) for record in reports.values()))
        record = next(iter(reports.values()))
        if not silent and not stuck:
            return
        steps = max(int(report["step"]) for report in reports.values())
        span = "step 1" if steps == 1 else f"steps 1 to {steps}"
        total, names = int(record["trainable"]), record["names"]
        ranks = sorted(reports)
        everywhere = " on any rank" if len(ranks) > 1 else ""
        if len(silent) == total:
            text = (
                f"None of the {total} trainable parameters of the {record['optimizer']} optimizer, "
                f"{_list(silent, names)}, got a gradient in {span}{everywhere}: it trains nothing. The "
                "optimizer may "
                "hold parameters of another model than the one that is used, as when the model was built "
                "anew, "
                "copied or converted after the optimizer was made."
            )
            advice = (
                "Make the optimizer from model.parameters() of the model that computes "
                "the loss, after it is built."
            )
        elif silent:
            text = (
                f"{_list(silent, names)} ({len(silent)} of {total} trainable parameters) got no gradient in "
                f"{span}{everywhere}: the loss does not depend on {_them(silent)}, so {_they(silent)} will "
                "not move. "
                "If this part of the model comes in later by design, all is well."
            )
            advice = (
                "Use the parameters in the forward pass; if they are to stay as they are, write "
                "parameter.requires_grad_(False), and leave them out of the optimizer. Look for detach(), "
                ".data and "
                "torch.no_grad() on the way to the loss."
            )
        else:
            text = (
                f"{_list(stuck, names)} ({len(stuck)} of {total} trainable parameters) did not change in "
                f"{span}, though "
                f"{_they(stuck)} got gradients and the learning rate is above 0."
            )
            advice = (
                "Look for what sets the parameters back after each step, or for a step "
                "that does not reach them."
            )
        self._judge.find(
            Verdict(
                kind="frozen-parameters",
                text=text,
                advice=advice,
                ranks=ranks,
                where=record["where"],
                step=steps,
            ),
            key=("frozen", record["key"]),
        )


def _list(indices: set[int], names: Mapping[str, str]) -> str:
    said = [names.get(str(index), f"parameter {index}") for index in sorted(indices)]
    if len(said) > 4:
        return f"{', '.join(said[:3])} and {len(said) - 3} more"
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


def _them(things: Sequence[int] | set[int]) -> str:
    return "it" if len(things) == 1 else "them"


def _they(things: Sequence[int] | set[int]) -> str:
    return "it" if len(things) == 1 else "they"


def _value(value: str) -> str:
    return "not a number (NaN)" if value == "nan" else "infinite"

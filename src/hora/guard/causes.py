"""Why do the ranks' models differ? Only what the ranks' reports show is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Difference", "Explanation", "explain"]

Records = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Difference:
    """What was seen.

    Attributes:
        starts: each rank's report before the first step.
        prints: each rank's report in which the difference shows; the same, if it was there at the start.
        what: ``parameters`` or ``state``.
        step: the step after which the difference was seen; 0: before the first.
        equal: the last step after which all was equal; 0: before the first; None: never.
        reduction: a call by which the script itself reduces tensors, with its line; None: it makes none.
    """

    starts: Records
    prints: Records
    what: str
    step: int
    equal: int | None
    reduction: str | None = None


@dataclass(frozen=True)
class Explanation:
    """A verdict's parts."""

    kind: str
    text: str
    advice: str
    ranks: Sequence[int]
    where: str | None


@dataclass(frozen=True)
class _Cause:
    text: str
    advice: str
    ranks: Sequence[int] = ()
    where: str | None = None
    kind: str = "diverged"


def explain(difference: Difference) -> Explanation:
    """The difference in words, with its cause if one shows."""
    from hora.guard.judge import ranks_text

    starts, prints, what = difference.starts, difference.prints, difference.what
    ranks = list(prints)
    index = _first(prints, what)
    names = starts[ranks[0]]["names"]
    name = names[index] if index is not None and index < len(names) else "a parameter"
    minority = _minority({rank: str(prints[rank][what]) for rank in ranks})
    causes: Sequence[Callable[[Difference], _Cause | None]] = (
        (_changed_after_broadcast, _restored, _never_broadcast)
        if difference.step == 0
        else (_rates, _restored, _written, _steered, _bypassed, _changed_gradients)
    )
    cause = next((found for cause in causes if (found := cause(difference)) is not None), None)
    if cause is None:
        cause = _Cause(
            "What did it does not show.",
            "Look for what depends on the rank: conditions on it, random numbers, files, or values such as "
            "the "
            "loss that steer the training.",
        )
    chosen = list(cause.ranks) or minority
    subject = f"Parameter {name}" if what == "parameters" else f"The optimizer's state for {name}"
    if difference.step == 0:
        when = "before the first step"
    else:
        since = "before the first step" if not difference.equal else f"after step {difference.equal}"
        when = f"after step {difference.step}; {since} they were still equal"
    odd = (
        ""
        if len(minority) == len(ranks)
        else f" {ranks_text(minority).capitalize()} {_has(minority)} other values than the rest."
    )
    text = f"{subject} is not the same on all ranks {when}.{odd} {cause.text}"
    where = cause.where or next((start["where"] for start in starts.values()), None)
    return Explanation(cause.kind, text, cause.advice, sorted(chosen), where)


# --- causes -------------------------------------------------------------------------------------


def _changed_after_broadcast(difference: Difference) -> _Cause | None:
    from hora.guard.judge import ranks_text

    starts = difference.starts
    changed = {rank: start["changed"] for rank, start in starts.items() if start["changed"]}
    if not changed or not all(start["broadcast"] for start in starts.values()):
        return None
    rank = min(changed)
    names = starts[rank]["names"]
    name = names[changed[rank][0]] if changed[rank][0] < len(names) else "a parameter"
    return _Cause(
        f"They were equal after broadcast_parameters; after that {name} was changed on "
        f"{ranks_text(list(changed))}, "
        "as by loading a checkpoint there.",
        "Load and change the model before hora.broadcast_parameters(model, root_rank=0), or on every rank.",
        ranks=list(changed),
    )


def _steered(difference: Difference) -> _Cause | None:
    """Learning rates that differed for some steps, and may be the same again."""
    changes = {
        rank: {int(step): rates for step, rates in record.get("steered", ())}
        for rank, record in difference.prints.items()
    }
    # Only the first changes are reported.
    seen = min(max(found) if found else difference.step for found in changes.values())
    for step in sorted({step for found in changes.values() for step in found if step <= seen}):
        values = {rank: found.get(step) for rank, found in changes.items()}
        if len(set(map(str, values.values()))) > 1:
            said = " and ".join(
                f"{', '.join(f'{rate:g}' for rate in rates[:3])} on rank {rank}"
                if rates
                else f"not on rank {rank}"
                for rank, rates in sorted(_examples(values), key=lambda example: example[1] is None)
            )
            return _Cause(
                f"The learning rate was changed for step {step} to {said}.",
                "Let what steers the learning rate be the same on every rank: a schedule that looks at the "
                "loss needs the mean over all ranks, scheduler.step(hora.mean(loss)).",
                ranks=_minority({rank: str(value) for rank, value in values.items()}),
            )
    return None


def _restored(difference: Difference) -> _Cause | None:
    from hora.guard.judge import ranks_text

    records = difference.prints
    restored = {rank: record["restored"] for rank, record in records.items() if record["restored"]}
    if not restored and difference.step == 0:
        restored = {rank: [] for rank, start in records.items() if start["stateful"]}
    if not restored or len(restored) == len(records):
        return None
    entries = next((entries for entries in restored.values() if entries), None)
    where = entries[0]["where"] if entries else None
    at = f" at {where}" if where else ""
    return _Cause(
        f"A state was restored on {ranks_text(list(restored))} only{at}.",
        "Restore on every rank; or on rank 0, and then write hora.broadcast_parameters(model, root_rank=0) "
        "and "
        "hora.broadcast_optimizer_state(optimizer, root_rank=0).",
        ranks=list(restored),
        where=where,
    )


def _never_broadcast(difference: Difference) -> _Cause | None:
    from hora.guard.judge import ranks_text

    starts = difference.starts
    if difference.what != "parameters" or all(start["broadcast"] for start in starts.values()):
        return None
    advice = "Write hora.broadcast_parameters(model, root_rank=0) before the first step."
    seeds = {rank: start["seed"] for rank, start in starts.items()}
    if None not in seeds.values() and len(set(seeds.values())) > 1:
        said = ", ".join(f"{seed} on rank {rank}" for rank, seed in list(seeds.items())[:4])
        return _Cause(
            f"The ranks were seeded differently ({said}), so that each has initialised a model of its own, "
            "and the "
            "parameters were never broadcast.",
            advice + " Or seed all ranks alike for building the model, and differently after that.",
            ranks=list(starts),
            kind="different-init",
        )
    minority = _minority({rank: str(start["parameters"]) for rank, start in starts.items()})
    whose = (
        "" if len(minority) == len(starts) else f" {ranks_text(minority).capitalize()} started from others."
    )
    return _Cause(f"The parameters were never broadcast.{whose}", advice)


def _rates(difference: Difference) -> _Cause | None:
    for records in (difference.starts, difference.prints):
        groups = {rank: record["rates"] for rank, record in records.items()}
        count = min(map(len, groups.values()))
        for number in range(count):
            for key in next(iter(groups.values()))[number]:
                values = {rank: rates[number].get(key) for rank, rates in groups.items()}
                if len(set(map(str, values.values()))) > 1:
                    said = " and ".join(f"{value} on rank {rank}" for rank, value in _examples(values))
                    return _Cause(
                        f"The optimizer's {key} differs: {said}"
                        + (f" (parameter group {number})." if count > 1 else "."),
                        f"Give every rank the same {key}; what it is computed from must not depend on the "
                        "rank.",
                        ranks=_minority({rank: str(value) for rank, value in values.items()}),
                    )
    return None


def _written(difference: Difference) -> _Cause | None:
    from hora.guard.judge import ranks_text

    records = difference.prints
    steps = sorted({entry["step"] for record in records.values() for entry in record["written"]})
    for step in steps:
        entries = {
            rank: [entry for entry in record["written"] if entry["step"] == step]
            for rank, record in records.items()
        }
        wrote = [rank for rank, found in entries.items() if found]
        contents = {
            tuple(entry["digest"] for entry in found if entry["digest"]) for found in entries.values()
        }
        if len(wrote) == len(records) and len(contents) < 2:
            continue
        entry = entries[wrote[0]][0]
        names = difference.starts[wrote[0]]["names"]
        name = (
            names[entry["which"][0]] if entry["which"] and entry["which"][0] < len(names) else "a parameter"
        )
        return _Cause(
            f"{name} was written to outside the optimizer, between steps {step} and {entry['until']}, on "
            f"{ranks_text(wrote)}"
            + (" only." if len(wrote) < len(records) else ", and not with the same values."),
            "Change parameters on every rank alike, or write hora.broadcast_parameters(model, root_rank=0) "
            "after it.",
            ranks=wrote,
        )
    return None


def _bypassed(difference: Difference) -> _Cause | None:
    starts = difference.starts
    if any(start["distributed"] for start in starts.values()):
        return None
    index = _first(difference.prints, "gradients")
    if index is None:
        return None
    wrapper = next((start["together"] for start in starts.values() if start["together"]), None)
    if wrapper == "DistributedDataParallel":
        return _Cause(
            "Each rank has stepped on gradients of its own: the model is wrapped in "
            "DistributedDataParallel, but "
            "was called around its wrapper (as by model.module(...)), which averages nothing.",
            "Call the wrapper itself: model(x), not model.module(x).",
            ranks=list(starts),
        )
    optimizer = next(iter(starts.values()))["optimizer"]
    if difference.reduction is not None:
        names = next(iter(starts.values()))["names"]
        name = names[index] if index < len(names) else "a parameter"
        return _Cause(
            f"The step has used gradients that differ between the ranks, first that of {name}. The script "
            f"reduces tensors itself ({difference.reduction}): either not this gradient, or something has "
            "changed it afterwards on each rank for itself, such as clipping, a mask or noise of its own.",
            "Average every gradient, and change them afterwards by what is the same on every rank; or write "
            f"optimizer = hora.DistributedOptimizer({optimizer}(...), model), which averages all of them in "
            "loss.backward().",
            ranks=list(starts),
        )
    return _Cause(
        "Each rank has stepped on gradients of its own: they were never averaged.",
        f"Write optimizer = hora.DistributedOptimizer({optimizer}(...), model).",
        ranks=list(starts),
    )


def _changed_gradients(difference: Difference) -> _Cause | None:
    index = _first(difference.prints, "gradients")
    if index is None:
        return None
    names = next(iter(difference.starts.values()))["names"]
    name = names[index] if index < len(names) else "a parameter"
    return _Cause(
        f"The step has used gradients that differ between the ranks, first that of {name}, though they had "
        "been "
        "averaged: something has changed them on each rank for itself before the step, such as clipping to "
        "a norm, "
        "or a mask or noise, of its own.",
        "Change gradients after loss.backward() by what is the same on every rank: there they are the "
        "average over "
        "all ranks, and torch.nn.utils.clip_grad_norm_ with one norm clips all alike.",
        ranks=list(difference.prints),
    )


# --- helpers ------------------------------------------------------------------------------------


def _first(records: Records, what: str) -> int | None:
    """The first place at which the ranks' lists differ; None: nowhere."""
    lists = [record.get(what) or [] for record in records.values()]
    for index in range(max(map(len, lists))):
        if len({values[index] if index < len(values) else None for values in lists}) > 1:
            return index
    return None


def _minority(values: Mapping[int, str]) -> list[int]:
    """Ranks that differ from what more than half have; all, if nothing is on more than half."""
    classes: dict[str, list[int]] = {}
    for rank, value in values.items():
        classes.setdefault(value, []).append(rank)
    largest = max(classes.values(), key=len)
    if len(largest) * 2 <= len(values):
        return sorted(values)
    return sorted(rank for rank in values if rank not in largest)


def _examples(values: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """One rank for each value, at most four."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, value in values.items():
        found.setdefault(str(value), (rank, value))
    return list(found.values())[:4]


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"

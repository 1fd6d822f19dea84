"""From the journals of the ranks to the steps that count: those that no restart has taken back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hora.core.journal import Entry, Span

__all__ = ["History", "Step", "history"]

Place = tuple[int, int]
"""Epoch and position in it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks of a world.

    Attributes:
        world: see :class:`Entry`.
        time: when the first rank had made it.
        ended: when the last one had.
        spans: the samples of all ranks, sorted.
        whole: whether every rank has written it down; of a step in which a rank was killed some have not.
        data: see :class:`Entry`.
        before: checksum of the parameters before it.
        after: checksum after it.
        total: see :class:`Entry`.
        processes: of the ranks.
    """

    world: str
    time: float
    ended: float
    spans: tuple[Span, ...]
    whole: bool
    data: str | None
    before: int | None
    after: int | None
    total: float
    processes: frozenset[int]

    @property
    def first(self) -> Place | None:
        """Where its samples begin."""
        return self.spans[0][:2] if self.spans else None

    @property
    def last(self) -> Place | None:
        """Where they end."""
        return max(((epoch, stop) for epoch, _, stop in self.spans), default=None)


@dataclass(kw_only=True)
class History:
    """The steps of a run.

    Attributes:
        steps: those that count, in their order.
        made: all, in the order of time.
        repeats: (time, steps) of each time that steps were taken back and made again.
        breaks: what does not follow from the step before it, in words.
        checked: whether the checksums of neighbouring steps agree wherever they are known.
    """

    steps: list[Step] = field(default_factory=list)
    made: list[Step] = field(default_factory=list)
    repeats: list[tuple[float, int]] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    checked: bool = True

    def coverage(self) -> dict[int, list[tuple[int, int]]]:
        """Epoch -> the samples used in it, as sorted ranges of positions; one used twice is in two ranges."""
        found: dict[int, list[tuple[int, int]]] = {}
        length = max((stop for step in self.steps if step.whole for _, _, stop in step.spans), default=0)
        around = zip([None, *self.steps], self.steps, [*self.steps[1:], None], strict=False)
        for since, step, until in around:
            for epoch, start, stop in step.spans if step.whole else _completed(since, step, until, length):
                found.setdefault(epoch, []).append((start, stop))
        return {epoch: _joined(ranges) for epoch, ranges in sorted(found.items())}


def history(entries: Iterable[Entry], *, checked: bool = True) -> History:
    """Put the entries of all ranks together.

    A step follows another if its samples begin where those of the other end and, with ``checked``, its
    parameters are those that the other left. A step that follows an earlier one takes back those in between.

    Args:
        entries: of all processes of a run.
        checked: whether the parameters are looked at. Where the script itself changes them between steps
            they tell nothing: ``checked`` of the undisturbed run's history says so.
    """
    made = _steps(entries)
    found = History(made=made)
    for step in made:
        if not found.steps or _follows(found.steps[-1], step, checked=checked):
            found.steps.append(step)
            continue
        back = _place_to_go_on(found.steps, step, checked=checked)
        if back is None:
            found.breaks.append(_break(len(found.steps), found.steps[-1], step))
            found.steps.append(step)
            continue
        found.repeats.append((step.time, len(found.steps) - back))
        found.steps[back:] = [step]
    found.checked = all(
        a.after == b.before or a.after is None or b.before is None for a, b in itertools.pairwise(found.steps)
    )
    return found


def _steps(entries: Iterable[Entry]) -> list[Step]:
    groups: dict[tuple[str, int], list[Entry]] = {}
    begun: dict[str, float] = {}
    for entry in entries:
        groups.setdefault((entry.world, entry.number), []).append(entry)
        begun[entry.world] = min(begun.get(entry.world, entry.time), entry.time)
    made = []
    for world, number in sorted(groups, key=lambda key: (begun[key[0]], key)):
        group = sorted(groups[world, number], key=lambda entry: entry.rank)
        lead = group[0]
        made.append(
            Step(
                world=world,
                time=min(entry.time for entry in group),
                ended=max(entry.time for entry in group),
                spans=tuple(sorted(span for entry in group for span in entry.spans if span[1] < span[2])),
                whole=len(group) == lead.size,
                data=lead.data,
                before=lead.before,
                after=lead.after,
                total=lead.total,
                processes=frozenset(entry.pid for entry in group),
            )
        )
    return made


def _follows(one: Step, other: Step, *, checked: bool) -> bool:
    if checked and None not in (one.after, other.before) and one.after != other.before:
        return False
    end, begin = one.last, other.first
    if end is None or begin is None:
        return True
    if not (one.whole and other.whole):  # the end that is missing may be theirs
        return begin >= end
    return begin == end or (begin[0] > end[0] and begin[1] == 0)


def _place_to_go_on(steps: Sequence[Step], step: Step, *, checked: bool) -> int | None:
    """After how many of the steps ``step`` belongs; None: after none, nor at the beginning."""
    for place in range(len(steps) - 1, 0, -1):
        if _follows(steps[place - 1], step, checked=checked):
            return place
    first = steps[0]
    if step.first is not None:
        return 0 if step.first == first.first else None
    return 0 if step.before is not None and step.before == first.before else None


def _break(count: int, last: Step, step: Step) -> str:
    if last.last is not None and step.first is not None and not _follows(last, step, checked=False):
        (epoch, stop), (there, start) = last.last, step.first
        return (
            f"after step {count}, which ended at position {stop} of epoch {epoch}, training went on at "
            f"position {start} of epoch {there}"
        )
    return f"step {count + 1} did not begin with the parameters that any step before it had left"


def _completed(since: Step | None, step: Step, until: Step | None, length: int) -> list[Span]:
    """The spans of a step that a rank did not write down: all between the step before it and the one after.

    The others have made the step with the samples of that rank, which had sent its gradients.

    Args:
        since: the step before it.
        step: it.
        until: the step after it.
        length: of an epoch.
    """
    spans = list(step.spans)
    if not spans or until is None or until.first is None:
        return spans
    first, last = spans[0][0], spans[-1][0]
    begin = since.last[1] if since is not None and since.last is not None and since.last[0] == first else 0
    end = until.first[1] if until.first[0] == last else length
    ends = [(first, begin, begin), *spans, (last, end, end)]
    holes = [
        (epoch, end, begin)
        for (epoch, _, end), (there, begin, _) in itertools.pairwise(ends)
        if epoch == there and end < begin
    ]
    return spans + holes


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined

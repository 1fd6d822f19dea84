"""Is a disturbed run's result that of the undisturbed one? Each difference is one plain sentence."""

from __future__ import annotations

import fcntl
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hora.chaos.acts import newest
from hora.chaos.history import History
from hora.chaos.processes import leftovers, segments, unused
from hora.core import commits
from hora.core.plural import plural
from hora.core.rundir import RunDirectory

__all__ = ["Compared", "checkpoints", "left_behind", "metrics", "samples"]

TIMES = frozenset({"time", "samples_per_second", "seconds"})
"""Keys of metrics that differ between any two runs."""

MOST = 8
"""Differences of one kind that are told one by one."""

LOCK = "lock"


@dataclass(kw_only=True)
class Compared:
    """What was looked at.

    Attributes:
        same: what agrees, in a few words.
        differences: what does not, one sentence each.
    """

    same: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(self, other: Compared) -> None:
        """Take in another."""
        self.same += other.same
        self.differences += other.differences


def metrics(one: RunDirectory, other: RunDirectory, *, tolerance: float, ignore: Collection[str]) -> Compared:
    """The last value of each metric.

    Args:
        one: the undisturbed run.
        other: the disturbed one.
        tolerance: largest relative difference; 0.0: every bit.
        ignore: keys that are not looked at.
    """
    expected, found = _last(one, ignore), _last(other, ignore)
    compared = Compared()
    for key, value in expected.items():
        if key not in found:
            compared.differences.append(f"the metric {key} is {value:.9g} undisturbed, and was never written")
        elif not _near(value, found[key], tolerance):
            compared.differences.append(
                f"the metric {key} is {value:.9g} undisturbed and {found[key]:.9g} disturbed"
                f"{_relative(value, found[key])}"
            )
    for key in sorted(set(found) - set(expected)):
        compared.differences.append(f"the metric {key} is {found[key]:.9g}, and was not written undisturbed")
    if expected and not compared.differences:
        compared.same.append(f"{len(expected)} {plural(len(expected), 'metric')}")
    return compared


def samples(one: History, other: History, *, tolerance: float) -> Compared:
    """The steps that count, and the samples that they used.

    Args:
        one: of the undisturbed run.
        other: of the disturbed one.
        tolerance: for the elements of the parameters that the histories know.
    """
    compared = Compared(differences=list(other.breaks))
    if not one.steps:
        return compared
    if not other.steps:
        compared.differences.append("no step of an optimizer was made")
        return compared
    expected, found = one.coverage(), other.coverage()
    lost_or_twice: list[str] = []
    for epoch in sorted({*expected, *found}):
        lost_or_twice += _ranges(epoch, expected.get(epoch, []), found.get(epoch, []))
    compared.differences += lost_or_twice[:MOST]
    if len(lost_or_twice) > MOST:
        compared.differences.append(f"and {len(lost_or_twice) - MOST} more such ranges of samples")
    if not expected and len(one.steps) != len(other.steps):
        compared.differences.append(f"{len(other.steps)} steps count, and {len(one.steps)} undisturbed")
    last, now = one.steps[-1], other.steps[-1]
    known = None not in (last.after, now.after)
    if known and not (
        last.after == now.after or _near(last.total, now.total, tolerance if tolerance else -1.0)
    ):
        compared.differences.append(
            f"the parameters after the last step are not those of the undisturbed run"
            f"{_relative(last.total, now.total)}"
        )
    if not compared.differences:
        count = sum(stop - start for ranges in expected.values() for start, stop in ranges)
        compared.same.append(f"{len(other.steps)} {plural(len(other.steps), 'step')}")
        if expected:
            epochs = len(expected)
            compared.same.append(
                f"{count} samples in {epochs} {plural(epochs, 'epoch')}, none lost and none used twice"
            )
    return compared


def checkpoints(one: RunDirectory, other: RunDirectory, *, tolerance: float) -> Compared:
    """The tensors of the last checkpoint, if the undisturbed run has written any."""
    compared = Compared()
    last = newest(one.path / "checkpoints")
    if last is None:
        if commits.places(one.path / "checkpoints"):
            compared.differences.append("the undisturbed run has checkpoints, and none of them is whole")
        return compared
    found = newest(other.path / "checkpoints")
    if found is None:
        compared.differences.append("there is no whole checkpoint at the end")
        return compared
    if found.step != last.step:
        compared.differences.append(
            f"the last whole checkpoint is that of step {found.step}, and of step {last.step} undisturbed"
        )
        return compared
    from hora.torch.chaos._tensors import differences

    told, count = differences(last.path, found.path, tolerance=tolerance)
    compared.differences += told[:MOST]
    if len(told) > MOST:
        compared.differences.append(f"and {len(told) - MOST} more tensors of the last checkpoint")
    if not told:
        compared.same.append(f"{count} {plural(count, 'tensor')} of the checkpoint of step {last.step}")
    return compared


def left_behind(
    mark: str, run: Path, *, folder: Path, pids: frozenset[int], before: frozenset[str]
) -> Compared:
    """Processes, shared memory and locks that outlive the job.

    Args:
        mark: of its processes.
        run: its run directory, as the job knew it.
        folder: the same as it can be seen from here.
        pids: of its ranks.
        before: shared memory that was there before it.
    """
    compared = Compared()
    for pid, command in leftovers(mark, run).items():
        compared.differences.append(f"a process is left behind: {command} (pid {pid})")
    for name in unused(segments() - before, pids):
        compared.differences.append(f"shared memory is left behind: {name}")
    lock = folder / "checkpoints" / LOCK
    if lock.exists() and _held(lock):
        compared.differences.append(f"the lock of {run / 'checkpoints'} is still held")
    if not compared.differences:
        compared.same.append("nothing left behind")
    return compared


def damaged(run: RunDirectory) -> list[commits.Place]:
    """Folders of checkpoints that have a marker and are not whole."""
    found = []
    for place in commits.places(run.path / "checkpoints"):
        try:
            if commits.problem_of(place.path, commits.read(place)) is not None:
                found.append(place)
        except commits.DamagedError:
            if (place.path / commits.MARKER).exists():
                found.append(place)
    return found


def _last(run: RunDirectory, ignore: Collection[str]) -> Mapping[str, float]:
    values: dict[str, float] = {}
    for record in run.read_metrics():
        kind = str(record.get("kind", "train"))
        for key, value in record.items():
            name = key if kind == "train" else f"{kind} {key}"
            if isinstance(value, int | float) and not {key, name} & (TIMES | set(ignore)):
                values[name] = float(value)
    return values


def _near(one: float, other: float, tolerance: float) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return tolerance >= 0
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _relative(one: float, other: float) -> str:
    largest = max(abs(one), abs(other))
    return f" (relative difference {abs(one - other) / largest:.1g})" if largest and one != other else ""


def _ranges(epoch: int, expected: Sequence[tuple[int, int]], found: Sequence[tuple[int, int]]) -> list[str]:
    """What the samples of an epoch have too little or too much."""
    told = []
    edges = sorted({edge for pair in (*expected, *found) for edge in pair})
    wrong: list[tuple[int, int, int, int]] = []
    for start, stop in itertools.pairwise(edges):
        want = sum(first <= start and stop <= last for first, last in expected)
        have = sum(first <= start and stop <= last for first, last in found)
        if want == have:
            continue
        if wrong and wrong[-1][1:] == (start, want, have):
            wrong[-1] = (wrong[-1][0], stop, want, have)
        else:
            wrong.append((start, stop, want, have))
    for start, stop, want, have in wrong:
        more = f"used {have} times" if have > 1 else "used, and were not undisturbed"
        what = "lost" if have < want else more
        told.append(f"epoch {epoch}: {stop - start} samples were {what} (positions {start} to {stop - 1})")
    return told


def _held(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(file, fcntl.LOCK_UN)
    return False

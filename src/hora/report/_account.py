"""The account of a run's time: all ranks' shares on one clock, in sentences, as a chart and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hora.core.clocks import Clock, clocks
from hora.core.errors import RunDirectoryError
from hora.core.events import Recording
from hora.core.plural import plural
from hora.core.rundir import RunDirectory, replace_text
from hora.core.trace import read_run, write_trace
from hora.report._charts import MOST_STACKS, Stack, stack_chart
from hora.report._shares import PARTS, Shares, mean_shares, shares, slowest

__all__ = ["STYLES", "Account", "account", "ranks_text"]

STYLES = {"compute": "a", "communication": "b", "data": "d", "other": "faint"}
"""The colour of each part, as the page's style sheet names it."""

LABELS = {
    "compute": "compute",
    "communication": "communication (exposed)",
    "data": "waiting for data",
    "other": "other",
}


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the time of a run went.

    Attributes:
        run: its directory.
        recordings: what each rank left, by rank; at least one.
        clocks: how the clock of each stands to that of the first.
        ranks: where the time of each went.
        size: ranks of the job, as the run directory says; None when it does not.
    """

    run: RunDirectory
    recordings: Mapping[int, Recording]
    clocks: Mapping[int, Clock]
    ranks: Mapping[int, Shares]
    size: int | None

    @property
    def missing(self) -> list[int]:
        """Ranks of the job that left no event."""
        return [rank for rank in range(self.size or 0) if rank not in self.ranks]

    @property
    def mean(self) -> Shares:
        """The mean over the ranks."""
        return mean_shares(list(self.ranks.values()))

    def notes(self) -> list[str]:
        """What to know about the figures, one sentence or two each, the most important first."""
        notes = [slowest(self.ranks)]
        if self.missing:
            notes.append(
                f"No events of {ranks_text(self.missing)} of {self.size}: "
                f"{'it' if len(self.missing) == 1 else 'they'} ended before writing any, or recorded none."
            )
        unseen = [rank for rank, one in self.ranks.items() if not one.data_seen]
        if unseen:
            of = "" if len(unseen) == len(self.ranks) else f" of {ranks_text(unseen)}"
            notes.append(
                f"Waiting for data{of} was not recorded and counts as compute; hora.data_loader or "
                "hora.track(loader) tells."
            )
        cut = {rank: one.dropped for rank, one in self.recordings.items() if one.dropped}
        if cut:
            notes.append(
                f"The timeline of {ranks_text(list(cut))} ends before the run: its limit was reached, and "
                f"up to {max(cut.values()):,} later events were not kept. HORA_TIMELINE_EVENTS raises it."
            )
        torn = sum(one.malformed for one in self.recordings.values())
        if torn:
            notes.append(
                f"{torn:,} {plural(torn, 'line')} of events could not be read and {_are(torn)} left out."
            )
        notes.append(clock_sentence(self.clocks))
        return [note for note in notes if note]

    def write(self, path: Path) -> None:
        """Write the merged trace, which Perfetto opens."""
        write_trace(self.recordings, path, standing=self.clocks)

    def write_picture(self, path: Path) -> None:
        """Write the chart as an SVG file that needs nothing else."""
        replace_text(path, _picture(self.chart(), heading=f"Where the time of {self.run.path.name} went"))

    def chart(self) -> str:
        """The chart as inline SVG in the style of the report."""
        ranks = list(self.ranks.items())
        group = math.ceil(len(ranks) / MOST_STACKS)
        stacks = []
        for at in range(0, len(ranks), group):
            members = ranks[at : at + group]
            first, last = members[0][0], members[-1][0]
            mean = mean_shares([one for _, one in members])
            stacks.append(
                Stack(
                    name=str(first) if first == last else f"{first}–{last}",
                    parts=[(name, value, STYLES[name]) for name, value in mean.parts().items()],
                )
            )
        return stack_chart(stacks, title="Where the time went", x_label="seconds", y_label="rank")

    def legend(self) -> list[tuple[str, str]]:
        """Style and text of each part, with its share of all ranks' time."""
        mean = self.mean
        return [
            (STYLES[name], f"{LABELS[name]}, {100 * value / (mean.wall or 1.0):.0f} %")
            for name, value in mean.parts().items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; times in seconds."""
        return {
            "run": str(self.run.path),
            "size": self.size,
            "missing": self.missing,
            "ranks": [
                {
                    "rank": rank,
                    "wall_s": one.wall,
                    **{f"{name}_s": value for name, value in one.parts().items()},
                    "data_s": one.data if one.data_seen else None,
                    "clock_offset_s": _finite(self.clocks[rank], self.clocks[rank].offset),
                    "clock_error_s": _finite(self.clocks[rank], self.clocks[rank].error),
                    "clock_bound_s": _finite(self.clocks[rank], self.clocks[rank].bound),
                    "clock_drift": self.clocks[rank].drift,
                    "events": len(self.recordings[rank].events),
                    "events_not_kept": self.recordings[rank].dropped,
                    "malformed_lines": self.recordings[rank].malformed,
                }
                for rank, one in self.ranks.items()
            ],
            "notes": self.notes(),
        }


def account(run: RunDirectory) -> Account:
    """Read the timelines of a run, in whatever state it is.

    Raises:
        RunDirectoryError: no rank recorded an event.
    """
    recordings = read_run(run)
    if not recordings:
        raise RunDirectoryError(
            f"{run.path} holds no timeline: no rank has written an event.",
            fix="Run a script that calls hora.torch.init(), without HORA_TIMELINE=off.",
        )
    return Account(
        run=run,
        recordings=recordings,
        clocks=clocks(recordings),
        ranks={rank: shares(one) for rank, one in recordings.items()},
        size=_size(run),
    )


def clock_sentence(standing: Mapping[int, Clock]) -> str:
    """How the clocks stand, and how sure that is; empty for one rank."""
    reference = min(standing, default=0)
    others = {rank: clock for rank, clock in standing.items() if rank != reference}
    known = {rank: clock for rank, clock in others.items() if clock.error < math.inf}
    sentences = []
    apart = {rank: clock for rank, clock in known.items() if not clock.agrees}
    if known and len(known) == len(others) and not apart:
        most = max(known.values(), key=lambda clock: abs(clock.offset))
        return (
            f"The ranks' clocks agree: the largest offset, from the ends of their collectives, is "
            f"{_time(abs(most.offset))} ± {_time(most.error)}."
        )
    alike: dict[Clock, list[int]] = {}
    for rank, clock in apart.items():
        alike.setdefault(clock, []).append(rank)  # one host, one clock
    told = sorted(alike, key=lambda clock: -abs(clock.offset))[:4]
    for clock in told:
        drift = f", drifting by {1e6 * clock.drift:+.1f} µs per second" if clock.drift else ""
        sentences.append(
            f"The clock of {ranks_text(alike[clock])} is {_time(abs(clock.offset))} ± {_time(clock.error)} "
            f"{'ahead of' if clock.offset > 0 else 'behind'} that of rank {reference}"
            f" (certain to {_time(clock.bound)}){drift}"
        )
    if len(alike) > len(told):
        sentences.append(f"{len(alike) - len(told)} more differ by less")
    if apart:
        sentences.append(f"The trace is on the clock of rank {reference}")
    unknown = [rank for rank in others if rank not in known]
    if unknown:
        sentences.append(
            f"How the clock of {ranks_text(unknown)} stands is not known: no collective was recorded that "
            f"rank {reference} took part in too"
        )
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def ranks_text(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 4 to 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = []
    for first, last in runs:
        words += (
            [str(first)]
            if first == last
            else [f"{first} to {last}"]
            if last > first + 1
            else [str(first), str(last)]
        )
    listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "no rank"
    return f"{plural(len(ranks), 'rank')} {listed}" if words else listed


def _picture(chart: str, *, heading: str) -> str:
    """The chart with its title, legend and style sheet; colours follow the reader's scheme."""
    sheet = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    colours = sheet[: sheet.index("* {")]
    rules = "\n".join(
        line for line in sheet.splitlines() if line.startswith("svg .") or line.startswith("svg text")
    )
    inner = chart[chart.index(">") + 1 : chart.rindex("</svg>")]
    _, _, width, height = map(float, chart.split('"', maxsplit=2)[1].split())  # its viewBox
    keys = ""
    x = 0.0
    for name in PARTS:
        keys += (
            f'<g class="stack"><rect class="{STYLES[name]}" x="{x}" y="30" width="11" height="11"/></g>'
            f'<text x="{x + 16}" y="40">{escape(LABELS[name])}</text>'
        )
        x += 34 + 6.3 * len(LABELS[name])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -6 {width + 32:g} {height + 66:g}" '
        f'width="{2 * (width + 32):g}" height="{2 * (height + 66):g}" role="img" '
        f'aria-label="{escape(heading)}">\n<style>\n{colours}{rules}\n'
        "svg { font: 12px system-ui, 'Liberation Sans', Arial, sans-serif; }\n</style>\n"
        f'<rect x="-16" y="-6" width="100%" height="100%" style="fill: var(--page)"/>'
        '<text x="0" y="14" style="fill: var(--ink); font-size: 15px; font-weight: 600">'
        f"{escape(heading)}</text>"
        f'{keys}\n<g transform="translate(0 56)">{inner}</g>\n</svg>\n'
    )


def _size(run: RunDirectory) -> int | None:
    try:
        about = run.about()
    except (RunDirectoryError, RecursionError):  # a torn run.json keeps no one from seeing the timeline
        return None
    world = about.get("world")
    for value in (world.get("size") if isinstance(world, dict) else None, about.get("workers")):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6:
            return value
    return None


def _finite(clock: Clock, value: float) -> float | None:
    return value if clock.error < math.inf else None


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.6g} s"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"

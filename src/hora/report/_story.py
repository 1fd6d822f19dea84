"""What a run came to, in words: the headline, the key figures, and the sentences beside the charts."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from hora.core.plural import plural
from hora.report._read import Failure, RunData, mapping, real

__all__ = [
    "Figure",
    "Outcome",
    "Scaling",
    "duration",
    "figures",
    "first_failure",
    "is_verdict",
    "outcome",
    "scaling",
    "size_text",
]

QUIET_AFTER = 120.0
"""Seconds without a change after which an unfinished run no longer counts as running."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The headline. ``state`` picks the colour and the sign before it."""

    state: Literal["good", "bad", "open"]
    headline: str
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One key figure, with what it means in a line."""

    name: str
    value: str
    unit: str = ""
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Throughput of one and of all workers, in samples/s, each with its calibration rounds."""

    one: float
    all: float
    workers: int
    factor: float
    """Of the throughputs, the median over the rounds where the run recorded it."""
    bounds: tuple[float, float] | None = None
    """The interval of 95 % of the factor."""
    one_rounds: tuple[float, ...] = ()
    all_rounds: tuple[float, ...] = ()

    def sentence(self) -> str:
        share = 100 * self.factor / self.workers
        between = ""
        if self.bounds is not None:
            between = f" With 95 % it is between {self.bounds[0]:.2f} and {self.bounds[1]:.2f}."
        return (
            f"Measured in this run: {self.workers} workers train {self.factor:.2f} times as fast as one, "
            f"{share:.0f} % of the ideal {self.workers}.{between}"
        )


def outcome(data: RunData, now: float | None = None) -> Outcome:
    """How the run ended, or that it has not."""
    now = time.time() if now is None else now
    failed = _failed(data)
    if failed is not None:
        return failed
    summary = data.entry("summary")
    if summary:
        return _finished(summary)
    code = data.about.get("exit_code")
    if code == 0:
        return Outcome(state="good", headline="Finished", more=_progress(data))
    quiet = now - data.last_change
    if quiet <= QUIET_AFTER:
        return Outcome(
            state="open",
            headline="Still running",
            more=f"{_progress(data)} Write this report again for news.",
        )
    return Outcome(
        state="bad",
        headline="Not finished",
        more=f"{_progress(data)} Nothing has been written since {_date(data)}.",
    )


def is_verdict(failure: Failure) -> bool:
    """Whether a rank only raised what the guard had found, which stands among the verdicts."""
    return failure.kind.rpartition(".")[2] == "VerdictError"


def first_failure(data: RunData) -> Failure | None:
    """The failure that came first and is not the echo of another rank's end.

    A script that has a summary and then exits with 1 did not fail: it missed its target and said so.
    """
    failures = [one for one in data.failures if not (one.exit and data.entry("summary"))]
    return min(failures, key=lambda one: (one.echo, math.isnan(one.time), one.time, one.rank), default=None)


def scaling(data: RunData) -> Scaling | None:
    """From the calibration in ``summary.scaling``; None when there was none or only one worker."""
    summary = data.entry("summary")
    entry = mapping(summary.get("scaling"))
    one, everyone = real(entry.get("one_worker")), real(entry.get("all_workers"))
    workers = workers_of(data)
    if workers < 2 or not (one > 0 and everyone > 0 and math.isfinite(one + everyone)):
        return None
    rounds = entry.get("rounds")
    pairs = [_pair(item) for item in rounds] if isinstance(rounds, list) else []
    factor, low, high = (real(entry.get(name)) for name in ("factor", "low", "high"))
    known = 0 < low <= factor <= high < math.inf
    return Scaling(
        one=one,
        all=everyone,
        workers=workers,
        factor=factor if known else everyone / one,
        bounds=(low, high) if known else None,
        one_rounds=tuple(first for first, _ in pairs if first > 0 and math.isfinite(first)),
        all_rounds=tuple(second for _, second in pairs if second > 0 and math.isfinite(second)),
    )


def figures(data: RunData) -> list[Figure]:
    """The key figures that are known, the most wanted first."""
    summary = data.entry("summary")
    result = []
    accuracy, target = real(summary.get("accuracy")), real(summary.get("target"))
    if math.isnan(accuracy):
        accuracy = next(
            (one.accuracy for one in reversed(data.evals) if math.isfinite(one.accuracy)), math.nan
        )
    if math.isfinite(accuracy):
        more = f"target {target:g}" if math.isfinite(target) else ""
        result.append(Figure(name="Accuracy", value=f"{accuracy:.4f}", more=more))
    seconds = real(summary.get("time_to_train"))
    if math.isfinite(seconds):
        value, unit = _split(duration(seconds))
        result.append(Figure(name="Time to train", value=value, unit=unit, more=_length(summary)))
    workers = workers_of(data)
    rate = real(summary.get("samples_per_second"))
    if math.isnan(rate):
        rates = [one.rate for one in data.train if math.isfinite(one.rate)]
        rate = median(rates) if rates else math.nan
    if math.isfinite(rate):
        more = f"{rate / workers:,.0f} per worker" if workers > 1 else ""
        result.append(Figure(name="Throughput", value=f"{rate:,.0f}", unit="samples/s", more=more))
    measured = scaling(data)
    factor = measured.factor if measured else real(summary.get("scaling_factor"))
    if math.isfinite(factor) and workers > 1:
        result.append(
            Figure(
                name="Scaling factor",
                value=f"{factor:.2f}",
                unit=f"of {workers}",
                more=f"{100 * factor / workers:.0f} % of ideal",
            )
        )
    if workers:
        hosts = real(data.entry("world").get("host_count"))
        more = f"on {hosts:.0f} {plural(hosts, 'host')}" if hosts >= 1 else ""
        result.append(Figure(name="Workers", value=f"{workers}", more=more))
    return result


def spread_sentence(rates: list[list[float]]) -> str:
    """How even the ranks are."""
    medians = [median(values) for values in rates if values]
    if len(medians) < 2 or median(medians) <= 0:
        return "Each box holds half of the measurements, each thin line 90 % of them."
    slowest = min(range(len(medians)), key=lambda rank: medians[rank])
    behind = 100 * (1 - medians[slowest] / median(medians))
    even = f"All ranks are within {max(behind, 0.0):.1f} % of the median."
    late = f"Rank {slowest} is the slowest, {behind:.0f} % below the median of all ranks."
    return (
        even if behind < 3 else late
    ) + " Each box holds half of the measurements, each thin line 90 % of them."


def workers_of(data: RunData) -> int:
    """The number of workers from the first place that knows it; 0 when none does."""
    for value in (
        data.entry("summary").get("workers"),
        data.entry("world").get("size"),
        data.about.get("workers"),
    ):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6:
            return value
    return len(data.rank_rates)


def duration(seconds: float) -> str:
    """71 s, 4 min 12 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size_text(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _failed(data: RunData) -> Outcome | None:
    first = first_failure(data)
    if first is not None:
        kind = first.kind.rpartition(".")[2]
        if is_verdict(first):
            return Outcome(state="bad", headline="Stopped by the guard", more=_progress(data))
        how = "exited with an error" if first.exit else f"raised {kind}"
        return Outcome(state="bad", headline=f"Failed: rank {first.rank} {how}", more=_progress(data))
    code = data.about.get("exit_code")
    if code in (None, 0) or data.entry("summary"):
        return None
    # No traceback: killed by a signal, stopped by the user, or out of time. The launcher says it in a line.
    text = data.about.get("failure")
    if not isinstance(text, str):
        return Outcome(state="bad", headline=f"Failed with exit code {code}", more=_progress(data))
    text = re.sub(r" failed on [^:]*:", ":", text.removeprefix("hora: "))
    ranks = text.startswith(("rank ", "all "))
    return Outcome(state="bad", headline=f"Failed: {text}" if ranks else _capital(text), more=_progress(data))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _finished(summary: dict[str, Any]) -> Outcome:
    accuracy, target = real(summary.get("accuracy")), real(summary.get("target"))
    seconds = real(summary.get("time_to_train"))
    length = _length(summary)
    after = f" after {length}" if length else ""
    if math.isfinite(seconds):
        after += f", {duration(seconds)}"
    if summary.get("reached") is True:
        number = f": {accuracy:.4f} accuracy" if math.isfinite(accuracy) else ""
        return Outcome(state="good", headline=f"Target reached{number}{after}")
    if summary.get("reached") is False:
        number = f": {accuracy:.4f} accuracy" if math.isfinite(accuracy) else ""
        wanted = f"The target is {target:g}." if math.isfinite(target) else ""
        return Outcome(state="bad", headline=f"Target missed{number}{after}", more=wanted)
    return Outcome(state="good", headline=f"Finished{after}")


def _progress(data: RunData) -> str:
    records = [*data.train[-1:], *data.evals[-1:]]
    steps = [record.step for record in records if math.isfinite(record.step)]
    if not steps:
        return "No step was recorded: hora.track(...).log(loss=...) records them."
    epochs = [record.epoch for record in records if math.isfinite(record.epoch)]
    epoch = f", epoch {max(epochs):.1f}" if epochs else ""
    return f"The last record is of step {max(steps):,.0f}{epoch}."


def _length(summary: dict[str, Any]) -> str:
    epochs = real(summary.get("epochs"))
    if not math.isfinite(epochs):
        return ""
    return f"{epochs:.4g} {plural(epochs, 'epoch')}"


def _pair(item: object) -> tuple[float, float]:
    if isinstance(item, dict):
        return real(item.get("one_worker")), real(item.get("all_workers"))
    if isinstance(item, list) and len(item) == 2:
        return real(item[0]), real(item[1])
    return math.nan, math.nan


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.rpartition(" ")
    return (value, unit) if value.replace(".", "").isdigit() else (text, "")


def _date(data: RunData) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(data.last_change))

"""How progress reads as text: numbers, durations, and the parts that the displays put together."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from hora.core.progress import Progress

__all__ = [
    "clean",
    "duration",
    "encodable",
    "fraction",
    "line",
    "number",
    "percent",
    "rate",
    "sanitized",
    "to_go",
]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
# ESC [ ... m sets colours and is kept; every other sequence moves the cursor, erases or sets titles.
_ESCAPE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS, APC, PM, SOS
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|[\x00-\x08\x0b-\x1a\x1b\x1c-\x1f\x7f-\x9f]"
)


def number(value: float) -> str:
    """A loss or a metric: three decimals where they say something, else powers of ten."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 0.01 or size == 0:
        return f"{value:.3f}"
    return f"{value:.2e}"


def rate(per_second: float) -> str:
    """A throughput with three significant digits or more: 2,310 or 23.1 or 0.53."""
    if per_second >= 99.95:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 9.995 else f"{per_second:.2f}"


def duration(seconds: float) -> str:
    """0:32, 12:05, 3:04:05, and 2 d 3 h from two days on."""
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def fraction(progress: Progress) -> float | None:
    """Done of total, 0 to 1; None where the total is not known."""
    if progress.total <= 0:
        return None
    return min(1.0, max(0.0, progress.done / progress.total))


def percent(progress: Progress) -> str:
    """Rounded down, so that 100 % means that nothing is left to do."""
    part = fraction(progress)
    if part is None:
        return f"{progress.done:,} {clean(progress.unit)}"
    return f"{100 if part == 1.0 else min(99, int(100 * part))} %"


def epoch(progress: Progress) -> str:
    if progress.epoch <= 0:
        return ""
    return f"epoch {progress.epoch}/{progress.epochs}" if progress.epochs > 0 else f"epoch {progress.epoch}"


def speed(progress: Progress) -> str:
    if not math.isfinite(progress.rate) or progress.rate <= 0:
        return ""
    return f"{rate(progress.rate)} {clean(progress.unit)}/s"


def per_worker(progress: Progress) -> str:
    if progress.size <= 1 or not speed(progress):
        return ""
    return f"({rate(progress.rate / progress.size)} per worker)"


def to_go(progress: Progress) -> str:
    """From ``eta``, else from the rate; empty when neither is known or nothing is left."""
    part = fraction(progress)
    if part == 1.0:
        return ""
    seconds = progress.eta
    if seconds is None and part is not None and math.isfinite(progress.rate) and progress.rate > 0:
        seconds = (progress.total - progress.done) / progress.rate
    if seconds is None or not math.isfinite(seconds) or seconds < 0 or seconds > 1e9:
        return ""
    return f"{duration(seconds)} to go"


def values(progress: Progress) -> list[tuple[str, str]]:
    return [(clean(name), number(value)) for name, value in progress.values.items()]


def line(progress: Progress) -> str:
    """All of it on one line of plain text."""
    shown = " ".join(filter(None, (speed(progress), per_worker(progress))))
    parts = [epoch(progress), percent(progress)]
    parts += [f"{name} {value}" for name, value in values(progress)]
    return "  ".join(filter(None, (*parts, shown, to_go(progress))))


def clean(text: str) -> str:
    """Without control characters: a name must not be able to move the cursor."""
    return _CONTROL.sub(" ", text)


def sanitized(text: str) -> str:
    """A worker's line made safe to stand above a live block: colours stay, cursor movements go.

    What a carriage return would have overwritten is left out, as on a terminal.
    """
    text = text.rstrip("\r\n")
    text = text[text.rfind("\r") + 1 :]
    if "\x1b" not in text:
        return _ESCAPE.sub("", text)
    text = _ESCAPE.sub(lambda match: match["colour"] or "", text)
    return f"{text}\x1b[0m"


def encodable(text: str, stream: TextIO) -> str:
    """``text``, with characters that the stream's encoding lacks spelled out, so that no write fails."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text

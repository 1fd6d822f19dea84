"""Measure contenders in turn, and tell what came out: medians, spread and ratios, as a table and as JSON.

Noise of the machine comes in spells. Contenders that take turns within each round see the same spells, so
ratios are taken within a round, and their median and quartiles are what a benchmark states.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Case = dict[str, str | int]
Cells = tuple[list[str], list[list[str]]]
"""The head and the lines of a table."""

PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "accelerate", "lightning-fabric", "horovod")


def interleave(
    measures: Mapping[str, Callable[[], T]], rounds: int, *, seconds: float = math.inf, least: int = 3
) -> dict[str, list[T]]:
    """What each measure returned, once per round, in an order that is drawn anew for each round.

    The order is the same on every rank and in every run: who comes after whom matters. Rounds end early when
    they have taken ``seconds``, but not before ``least``; give a bound to one process only, never to ranks.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    names, draw = list(measures), random.Random(0)
    began = time.monotonic()
    for index in range(rounds):
        if index >= least and time.monotonic() - began > seconds:
            break
        draw.shuffle(names)
        for name in names:
            found[name].append(measures[name]())
    return found


class Spread(NamedTuple):
    """The median, and the middle half from ``low`` to ``high``."""

    median: float
    low: float
    high: float

    def text(self, show: Callable[[float], str]) -> str:
        if self.low == self.high:
            return show(self.median)
        return f"{show(self.median)} ({show(self.low)} to {show(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def speedup(base: Sequence[float], own: Sequence[float]) -> Spread:
    """How many times faster ``own`` is than ``base``, round by round: above 1 is faster."""
    return spread([one / other for one, other in zip(base, own, strict=True)])


@dataclasses.dataclass
class Row:
    """What one contender took in one case.

    Attributes:
        values: by round; seconds, unless ``unit`` says "bytes".
        base: the contender that it is compared with.
        ratio: how many times less than the base's it is.
    """

    case: Case
    contender: str
    values: list[float]
    base: str
    unit: str = "s"
    ratio: Spread | None = None

    @property
    def spread(self) -> Spread:
        return spread(self.values)

    def show(self, value: float) -> str:
        return duration(value) if self.unit == "s" else size(value)


class Report:
    """The rows of one benchmark.

    Args:
        benchmark: its name, the same as its file's.
        base: the contender that the others are compared with.
    """

    def __init__(self, benchmark: str, *, base: str) -> None:
        self.benchmark = benchmark
        self.base = base
        self.rows: list[Row] = []
        self.left_out: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.failed = False

    def add(
        self,
        case: Case,
        measured: Mapping[str, list[float]],
        *,
        unit: str = "s",
        base: str | None = None,
        ratios: Mapping[str, Spread] | None = None,
    ) -> None:
        """Take one case's values by contender. Rounds of all of them are paired.

        ``ratios`` are those of a benchmark that estimates them better than round by round.
        """
        name = base or self.base
        others = measured.get(name, [])
        for contender, values in measured.items():
            paired = len(others) == len(values) and min(values) > 0
            ratio = speedup(others, values) if paired else None
            ratio = (ratios or {}).get(contender, ratio)
            self.rows.append(Row(case, contender, values, name, unit, ratio))

    def leave_out(self, contender: str, reason: str, *, failed: bool = False) -> None:
        """Say that a contender does not take part; ``failed`` where it should have."""
        if contender not in self.left_out:
            self.left_out[contender] = reason
            print(f"{'FAILED' if failed else 'left out'}: {contender}: {reason}", flush=True)
        self.failed |= failed

    def note(self, contender: str, text: str) -> None:
        if self.notes.get(contender) != text:
            self.notes[contender] = text
            print(f"{contender}: {text}", flush=True)

    def finish(self, path: Path | None) -> int:
        """Write the file, if there is a path; the exit code is 1 if a contender failed.

        Call it also between two cases that take long: what was measured stays when a later one fails.
        """
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return int(self.failed)

    def as_json(self) -> dict[str, Any]:
        rows = [
            dataclasses.asdict(row)
            | {"spread": row.spread._asdict(), "ratio": row.ratio and row.ratio._asdict()}
            for row in self.rows
        ]
        return {
            "benchmark": self.benchmark,
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(),
            "left_out": self.left_out,
            "notes": self.notes,
            "rows": rows,
        }


def long_table(rows: Sequence[Row]) -> str:
    """One line per contender and case."""
    return table(*long_cells(rows))


def long_cells(rows: Sequence[Row]) -> Cells:
    lines, before = [], None
    for row in rows:
        title = "" if row.case == before else case_text(row.case)
        before = row.case
        ratio = "" if row.ratio is None else row.ratio.text(number)
        lines.append([title, row.contender, row.spread.text(row.show), ratio])
    bases = {row.base for row in rows}
    base = bases.pop() if len(bases) == 1 else "the first of the case"
    return ["case", "contender", "median (middle half)", f"{base} over it"], lines


def wide_table(rows: Sequence[Row]) -> str:
    """One line per case, one column per contender: the median, and the base's value over it."""
    return table(*wide_cells(rows)) + f"\n(x: {rows[0].base} over it)"


def wide_cells(rows: Sequence[Row]) -> Cells:
    contenders = list(dict.fromkeys(row.contender for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        text = row.show(row.spread.median)
        if row.ratio is not None and row.contender != row.base:
            text += f" x{row.ratio.median:.2f}"
        cells.setdefault(case_text(row.case), {})[row.contender] = text
    lines = [[case, *(found.get(name, "") for name in contenders)] for case, found in cells.items()]
    return ["case", *contenders], lines


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[index]) for line in [head, *lines]) for index in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    )


def case_text(case: Case) -> str:
    return ", ".join(
        value if isinstance(value, str) else size(value) if name == "bytes" else plural(value, name)
        for name, value in case.items()
    )


def number(value: float) -> str:
    """A ratio: near 1 with a third digit, far above it with none."""
    if 0 < abs(value - 1) < 0.02:
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def plural(count: int, name: str) -> str:
    return f"{count:,} {name.removesuffix('s') if count == 1 else name}"


def duration(seconds: float) -> str:
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def size(count: float) -> str:
    """Bytes as people write them: 64 KiB, 1 MiB, 100 MB."""
    if count >= 2**20:
        return f"{count / 2**20:.4g} MiB" if count % 2**20 == 0 else f"{count / 1e6:.4g} MB"
    return f"{count / 2**10:.4g} KiB" if count >= 2**10 else f"{count:.0f} B"


def machine() -> dict[str, Any]:
    """Where it was measured, and with what."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": found,
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured to this file")
    return parser


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

"""One table of what the benchmarks found, from the files that they wrote.

    python benchmarks/summary.py runs/bench [--all]
    python benchmarks/summary.py runs/bench --page docs/performance.md

With ``--page``, the figures of that page are replaced and its plots drawn again, which takes matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _interleave import Cells, Row, Spread, case_text, number, size, speedup, spread, table
from _parts import PARTS, STATES, Part

NOT_MEASURED, UNTIL_THEN = "not measured", "those until then"
OURS = ("with the guard", "Hora", "Hora, in the engine", "Hora, sharded", "hora run", "hora run, hora.torch")
MEMORY_PEERS = ("DDP", "DDP + ZeRO", "FSDP2", "torchrun")
"""Others keep as much as DDP, which they are made of."""

MAIN_PEERS = ("Gloo", "DDP", "torchrun", "without the guard")
"""Those whose lines are in the short table though they have no aim."""

BANDS = (2**16 - 1, 2**20, 2**24 - 1, 2**62)
"""Upper bounds of the sizes of collectives that are summed up in one line each."""

AIMS = {
    ("Hora", "Gloo", BANDS[0]): 5.0,
    ("Hora", "Gloo", BANDS[1]): 5.0,
    ("Hora", "Gloo", BANDS[3]): 2.0,
    ("Hora", "MPI", BANDS[1]): 1.0,
    ("Hora", "MPI", BANDS[2]): 1.0,
    ("Hora", "MPI", BANDS[3]): 1.0,
    ("Hora, in the engine", "Gloo", BANDS[2]): 6.0,
    ("Hora, in the engine", "Gloo", BANDS[3]): 6.0,
    ("Hora, in the engine", "copy", BANDS[3]): 1 / 1.3,
    ("Hora", "DDP", "transformer, 2 ranks, step"): 1.25,
    ("Hora", "DDP", "resnet, 2 ranks, step"): 1.03,
    ("with the guard", "without the guard", "resnet, 2 ranks, step"): 1 / 1.01,
    ("with the guard", "without the guard", "transformer, 2 ranks, step"): 1 / 1.01,
}
"""Ratios that Hora has set itself for two ranks on two cores; for collectives, of the all-reduce. With more
ranks: never slower than Gloo. The
optimizer's memory, sharded over N ranks, shall be within 5 % of 1/N."""


@dataclass(frozen=True)
class Line:
    """Hora beside one peer.

    Attributes:
        ratio: the peer's over Hora's, so above 1 Hora is ahead; its bounds are the middle half of the rounds,
            or the lowest and highest of several sizes. None: not measured, and ``values`` says so.
        least: what is held against the aim: the median, or the lowest of several sizes.
    """

    measure: str
    ours: str
    peer: str
    values: str
    ratio: Spread | None
    aim: float | None = None
    least: float = 0.0

    @property
    def main(self) -> bool:
        return self.ratio is None or self.aim is not None or self.peer in MAIN_PEERS


@dataclass(frozen=True)
class Results:
    """What the benchmarks wrote.

    Attributes:
        files: by benchmark, in however many calls, with rows as ``Row``; in the order of the parts.
        missing: parts of which something is missing, and why; those that have no file have no figures.
        quick: whether few rounds were measured.
    """

    files: dict[str, Any]
    missing: dict[Part, str]
    quick: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of the files that the benchmarks wrote by --json")
    parser.add_argument("--page", type=Path, help="Markdown page whose figures are replaced")
    parser.add_argument("--all", action="store_true", help="also what has no aim, beside every peer")
    given = parser.parse_args()
    results = read(given.results)
    if not results.files:
        print(f"{given.results} has no results. Write: make bench")
        return 1
    lines = list(summarised(results))
    print(table(*cells([line for line in lines if line.main or given.all])))
    print(
        "ratio: the peer's over Hora's; from, to: middle half of the rounds, or least and most of all sizes"
    )
    for benchmark, found in results.files.items():
        for contender, reason in found["left_out"].items():
            print(f"left out of {benchmark}: {contender}: {reason.splitlines()[0]}")
    if given.page is not None:
        import _page

        _page.fill(given.page, results, cells([line for line in lines if line.main]))
        print(f"{given.page} shows these figures")
    return 0


def read(folder: Path) -> Results:
    """What is there, and what is not."""
    files: dict[str, Any] = {}
    known = [part.file(folder) for part in PARTS]
    others = [path for path in sorted(folder.glob("*.json")) if path not in known and path.name != STATES]
    for path in [*known, *others]:
        if not path.exists():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        found["rows"] = [row_of(row) for row in found["rows"]]
        earlier = files.setdefault(found["benchmark"], found)
        if earlier is not found:
            earlier["rows"] += found["rows"]
            earlier["left_out"] |= found["left_out"]
            earlier["notes"] |= found["notes"]
            earlier["command"] += "\n" + found["command"]
    states: dict[str, Any] = {"quick": False, "parts": {}}
    if (folder / STATES).exists():
        states = json.loads((folder / STATES).read_text(encoding="utf-8"))
    missing: dict[Part, str] = {}
    for part in PARTS:
        reason = states["parts"].get(part.name, {}).get("reason")
        if not part.file(folder).exists():
            missing[part] = reason or "it was not run"
        elif reason:
            missing[part] = f"{reason}; the figures above are {UNTIL_THEN}"
    return Results(files, missing, states["quick"])


def row_of(found: dict[str, Any]) -> Row:
    ratio = found["ratio"] and Spread(**found["ratio"])
    return Row(found["case"], found["contender"], found["values"], found["base"], found["unit"], ratio)


def summarised(results: Results) -> Iterator[Line]:
    for benchmark, found in results.files.items():
        if benchmark == "collectives":
            yield from of_collectives(found["rows"])
        else:
            for rows in by_case(found["rows"]):
                yield from of_case(rows)
        for contender in found["left_out"]:
            yield Line(benchmark.replace("_", " "), "", contender, NOT_MEASURED, None)
    for part in results.missing:
        rest = " (the rest)" if UNTIL_THEN in results.missing[part] else ""
        yield Line(f"{part.title}{rest}", "", "", NOT_MEASURED, None)


def by_case(rows: list[Row]) -> Iterator[dict[str, Row]]:
    """The rows of each case by contender."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(case_text(row.case), {})[row.contender] = row
    yield from cases.values()


def of_case(rows: dict[str, Row]) -> Iterator[Line]:
    for ours in [row for name, row in rows.items() if name in OURS]:
        measure = case_text(ours.case)
        for name, peer in rows.items():
            if name in OURS or (ours.unit == "bytes" and name not in MEMORY_PEERS) or not min(ours.values):
                continue
            values = f"{ours.show(ours.spread.median)} : {peer.show(peer.spread.median)}"
            ratio = speedup(peer.values, ours.values)
            if ours.ratio is not None and name == ours.base:
                ratio = ours.ratio  # which may be estimated better than round by round
            aim = AIMS.get((ours.contender, name, measure))
            if (ours.contender, name, ours.case.get("measure")) == (
                "Hora, sharded",
                "DDP",
                "optimizer memory",
            ):
                aim = int(ours.case["ranks"]) / 1.05
            if name == "one worker":  # which does one rank's share of the work
                ranks = int(ours.case["ranks"])
                ratio = Spread(*(ranks * value for value in ratio))
                yield Line(f"{measure}, samples per second", ours.contender, name, values, ratio)
            else:
                yield Line(measure, ours.contender, name, values, ratio, aim, ratio.median)


def of_collectives(rows: list[Row]) -> Iterator[Line]:
    """A line per collective, number of ranks, band of sizes and peer."""
    groups: dict[tuple[str, int, int, str, str], dict[int, float]] = {}
    for found in by_case(rows):
        for ours in [row for name, row in found.items() if name in OURS]:
            count, ranks = int(ours.case["bytes"]), int(ours.case["ranks"])
            band = min(bound for bound in BANDS if count <= bound)
            for name, peer in found.items():
                # A copy of few bytes is but a call.
                if name not in OURS and (name != "copy" or band == BANDS[-1]):
                    key = (str(ours.case["collective"]), ranks, band, ours.contender, name)
                    groups.setdefault(key, {})[count] = speedup(peer.values, ours.values).median
    for (collective, ranks, band, ours_name, peer_name), ratios in groups.items():
        aim = 1.0 if peer_name == "Gloo" and ranks > 2 else None
        if collective == "all-reduce" and ranks == 2:
            aim = AIMS.get((ours_name, peer_name, band))
        sizes = size(min(ratios)) + (f" to {size(max(ratios))}" if len(ratios) > 1 else "")
        measure = f"{collective}, {ranks} ranks, {sizes}"
        over_sizes = Spread(spread(list(ratios.values())).median, min(ratios.values()), max(ratios.values()))
        yield Line(measure, ours_name, peer_name, "", over_sizes, aim, over_sizes.low)


def cells(lines: list[Line]) -> Cells:
    head = ["measure", "Hora", "peer", "values", "ratio", "from", "to", "aim", "held"]
    return head, [
        [
            *(line.measure, line.ours, line.peer, line.values),
            *(("", "", "") if line.ratio is None else (number(value) for value in line.ratio)),
            *(
                ("", "")
                if line.aim is None
                else (f"{line.aim:.2f}", "yes" if line.least >= line.aim else "no")
            ),
        ]
        for line in lines
    ]


if __name__ == "__main__":
    raise SystemExit(main())

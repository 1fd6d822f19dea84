"""One table of what the benchmarks found, from the files that they wrote.

    python benchmarks/summary.py runs/bench
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

from _interleave import Cells, Row, Spread, case_text, size, speedup, spread, table

OURS = ("Hora", "Hora, in the engine", "Hora, sharded", "hora run", "hora run, hora.torch")
MEMORY_PEERS = ("DDP", "DDP + ZeRO", "FSDP2", "torchrun")
"""Others keep as much as DDP, which they are made of."""

BANDS = (2**20, 2**24 - 1, 2**62)
"""Upper bounds of the sizes of collectives that are summed up in one line each."""

AIMS = {
    ("Hora", "Gloo", BANDS[0]): 5.0,
    ("Hora", "Gloo", BANDS[2]): 2.0,
    ("Hora", "MPI", BANDS[1]): 1.0,
    ("Hora", "MPI", BANDS[2]): 1.0,
    ("Hora, in the engine", "Gloo", BANDS[1]): 6.0,
    ("Hora, in the engine", "Gloo", BANDS[2]): 6.0,
    ("Hora, in the engine", "copy", BANDS[2]): 1 / 1.3,
    ("Hora", "DDP", "transformer, 2 ranks, step"): 1.25,
    ("Hora", "DDP", "resnet, 2 ranks, step"): 1.03,
    ("Hora, sharded", "DDP", "transformer, 2 ranks, optimizer memory"): 2 / 1.05,
}
"""Ratios that Hora has set itself for two ranks on two cores. With more ranks: never slower than Gloo."""


@dataclass(frozen=True)
class Line:
    """Hora beside one peer.

    Attributes:
        ratio: the peer's over Hora's, so above 1 Hora is ahead; its bounds are the middle half of the rounds,
            or the lowest and highest of several sizes.
    """

    measure: str
    ours: str
    peer: str
    values: str
    ratio: Spread
    aim: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of the files that the benchmarks wrote by --json")
    parser.add_argument("--page", type=Path, help="Markdown page whose figures are replaced")
    given = parser.parse_args()
    files = read(given.results)
    if not files:
        print(f"{given.results} has no results. Write: make bench")
        return 1
    lines = list(summarised(files))
    print(table(*cells(lines)))
    print(
        "ratio: the peer's over Hora's; from, to: middle half of the rounds, or least and most of all sizes"
    )
    for benchmark, found in files.items():
        for contender, reason in found["left_out"].items():
            print(f"left out of {benchmark}: {contender}: {reason.splitlines()[0]}")
    if given.page is not None:
        import _page

        _page.fill(given.page, files, cells(lines))
        print(f"{given.page} shows these figures")
    return 0


def read(folder: Path) -> dict[str, Any]:
    """What each benchmark wrote, in however many calls, by its name, with its rows as ``Row``."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        found["rows"] = [row_of(row) for row in found["rows"]]
        earlier = files.setdefault(found["benchmark"], found)
        if earlier is not found:
            earlier["rows"] += found["rows"]
            earlier["left_out"] |= found["left_out"]
            earlier["command"] += "\n" + found["command"]
    return files


def row_of(found: dict[str, Any]) -> Row:
    ratio = found["ratio"] and Spread(**found["ratio"])
    return Row(found["case"], found["contender"], found["values"], found["base"], found["unit"], ratio)


def summarised(files: dict[str, Any]) -> Iterator[Line]:
    for benchmark, found in files.items():
        if benchmark == "collectives":
            yield from of_collectives(found["rows"])
        else:
            for rows in by_case(found["rows"]):
                yield from of_case(rows)


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
            ratio, aim = speedup(peer.values, ours.values), AIMS.get((ours.contender, name, measure))
            if name == "one worker":  # which does one rank's share of the work
                ranks = int(ours.case["ranks"])
                ratio = Spread(*(ranks * value for value in ratio))
                yield Line(f"{measure}, samples per second", ours.contender, name, values, ratio, aim)
            else:
                yield Line(measure, ours.contender, name, values, ratio, aim)


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
        aim = AIMS.get((ours_name, peer_name, band)) if ranks == 2 else 1.0 if peer_name == "Gloo" else None
        measure = f"{collective}, {ranks} ranks, {size(min(ratios))} to {size(max(ratios))}"
        over_sizes = Spread(spread(list(ratios.values())).median, min(ratios.values()), max(ratios.values()))
        yield Line(measure, ours_name, peer_name, "", over_sizes, aim)


def cells(lines: list[Line]) -> Cells:
    head = ["measure", "Hora", "peer", "values", "ratio", "from", "to", "aim"]
    return head, [
        [
            *(line.measure, line.ours, line.peer, line.values),
            *(f"{value:.2f}" for value in line.ratio),
            "" if line.aim is None else f"{line.aim:.2f}",
        ]
        for line in lines
    ]


if __name__ == "__main__":
    raise SystemExit(main())

"""``hora trace RUN``: where a run's time went, and its timeline on one clock for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hora.core.errors import RunDirectoryError
from hora.core.rundir import RunDirectory

if TYPE_CHECKING:
    from hora.report import Account


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory, such as runs/resnet-1")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where the trace goes; default: RUN/timeline.json"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Write the trace and the picture beside it, and print the table; 0.

    Raises:
        RunDirectoryError: RUN is not a run directory, holds no timeline, or cannot be written.
    """
    from hora.report import account

    run = RunDirectory.open(arguments.run)
    found = account(run)
    path = run.timeline if arguments.output is None else arguments.output
    picture = path.with_suffix(".svg")
    try:
        found.write(path)
        found.write_picture(picture)
    except RunDirectoryError as error:
        raise type(error)(error.what, fix="Choose another place with -o FILE.") from error
    if arguments.json:
        files = {"trace": str(path), "picture": str(picture)}
        print(json.dumps(found.as_json() | files, indent=2))
        return 0
    _print_table(found)
    for note in found.notes():
        print(note)
    print(f"trace:   {path} (open it at ui.perfetto.dev)")
    print(f"picture: {picture}")
    return 0


def _print_table(found: Account) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"compute": "blue", "communication": "yellow", "data": "magenta", "other": "bright_black"}
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(highlight=False, width=200)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("rank")
    table.add_column("wall", justify="right")
    for name, colour in colours.items():
        table.add_column(name, justify="right", header_style=f"bold {colour}", no_wrap=True)
    bars = console.is_terminal and console.width >= 110
    if bars:
        table.add_column("")
    rows = {str(rank): one for rank, one in found.ranks.items()}
    if len(rows) > 1:
        rows["mean"] = found.mean
    for label, one in rows.items():
        cells: list[str | Text] = [label, f"{one.wall:.2f} s"]
        for name, value in one.parts().items():
            seen = name != "data" or one.data_seen
            cells.append(
                f"{value:.2f} s {100 * value / (one.wall or 1.0):3.0f} %" if seen else "not recorded"
            )
        if bars:
            bar, drawn, so_far = Text(), 0, 0.0
            for name, value in one.parts().items():
                so_far += value
                wide = round(30 * so_far / (one.wall or 1.0)) - drawn
                bar.append("█" * wide, style=colours[name])
                drawn += wide
            cells.append(bar)
        table.add_row(*cells)
    console.print(table)
    sys.stdout.flush()

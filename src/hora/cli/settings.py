"""``hora settings``: every setting, its value and where it came from."""

from __future__ import annotations

import argparse

from hora.core import settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``--all``."""
    parser.add_argument("--all", action="store_true", help="also the ones that the launcher sets")


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 0.

    Raises:
        SettingError: a ``HORA_*`` variable with a wrong name or value.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("variable", "value", "from", "default", "unit", "meaning"):
        table.add_column(heading, no_wrap=heading == "variable", overflow="fold")
    for row in settings.rows():
        if row.by == "user" or arguments.all:
            table.add_row(row.variable, row.value, row.source, row.default, row.unit, row.meaning)
    Console(highlight=False).print(table)
    return 0

"""``hora report RUN``: write a run's ``report.html`` again, from the files of its run directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hora.core.rundir import RunDirectory


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory, such as runs/resnet-1")
    parser.add_argument(
        "--text", action="store_true", help="print it as Markdown, without charts, and write no file"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def main(arguments: argparse.Namespace) -> int:
    """0 when the report was written, or printed, and shown if that was asked for."""
    from hora.report import markdown_of, write_report

    run = RunDirectory.open(arguments.run)
    if arguments.text:
        print(markdown_of(run))
        return 0
    path = write_report(run)
    print(path)
    run.about()  # the page says what it could not read; so does an error here
    if arguments.open:
        import webbrowser

        if not webbrowser.open(path.as_uri()):
            print("hora: no browser was found; open the file above in one", file=sys.stderr)
            return 1
    return 0

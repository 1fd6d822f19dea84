"""``hora mlperf``: check a run's log by MLPerf's rules, score several runs, compare with published ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NOTE = "Not an MLPerf result: other data, and nobody has reviewed it."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the three questions."""
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    sub = questions.add_parser("check", help="does the log pass the compliance checker of v0.7?")
    sub.add_argument("run", type=Path, metavar="RUN")
    sub = questions.add_parser("score", help="mean time of several runs, the fastest and the slowest dropped")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    sub = questions.add_parser("compare", help="a run beside the published results of v0.6")
    sub.add_argument("run", type=Path, metavar="RUN")


def main(arguments: argparse.Namespace) -> int:
    """Print the answer; 0, or 1 when a log does not pass.

    Raises:
        HoraError: a run has no log, or the runs make no score.
    """
    return {"check": _check, "score": _score, "compare": _compare}[arguments.question](arguments)


def _check(arguments: argparse.Namespace) -> int:
    from hora.mlperf.check import RULE_SET, check

    good, said = check(arguments.run)
    if good:
        print(f"{arguments.run / 'mlperf.log'} passes the compliance checker of rule set {RULE_SET}.", NOTE)
        return 0
    print(said, file=sys.stderr)
    print(f"hora: {arguments.run / 'mlperf.log'} does not pass rule set {RULE_SET}", file=sys.stderr)
    return 1


def _score(arguments: argparse.Namespace) -> int:
    from hora.mlperf.result import read
    from hora.mlperf.score import score

    found = score([read(run) for run in arguments.runs])
    for one in (found.fastest, *found.counted, found.slowest):
        dropped = {id(found.fastest): "dropped: fastest", id(found.slowest): "dropped: slowest"}
        missed = "" if one.reached else ", target missed"
        print(f"{one.seconds:10.1f} s  {one.run}  {dropped.get(id(one), '')}{missed}".rstrip())
    print(f"{found.seconds:10.1f} s  score of {found.fastest.benchmark}")
    print(NOTE)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from hora.mlperf.result import read
    from hora.mlperf.score import published

    mine = read(arguments.run)
    rows = [("minutes", "epochs", "batch", "workers", "system")]
    rows += [
        (
            f"{float(row['score_minutes']):.2f}",
            row["converge_epoch_median"],
            row["global_batch"],
            row["accelerators"],
            f"{row['submitter']} {row['nodes']} x {row['system']}, {row['accelerator']}",
        )
        for row in published(mine.benchmark)
    ]
    ended = "" if mine.reached else " (target missed)"
    mine_row = (f"{mine.seconds / 60:.2f}", str(mine.epochs), str(mine.global_batch), "")
    rows.append((*mine_row, f"{arguments.run}{ended}"))
    for minutes, epochs, batch, workers, system in rows:
        print(f"{minutes:>9} {epochs:>7} {batch:>7} {workers:>8}  {system}")
    print(f"{mine.benchmark} of MLPerf Training v0.6, closed division, beside this run.", NOTE)
    return 0

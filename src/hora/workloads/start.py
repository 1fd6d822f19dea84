"""How a worker of any workload starts, and what it says when nobody else does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hora.torch as hora

__all__ = ["Ended", "start"]


class Ended(Protocol):
    """How a training ended."""

    @property
    def missed(self) -> Sequence[str]:
        """A sentence for each target that was not reached."""
        ...


class Options(Protocol):
    """The options of a workload."""

    def add(self, parser: argparse.ArgumentParser, /) -> None:
        """Add them to a command line."""
        ...

    def profile(self, arguments: argparse.Namespace, /) -> Any:
        """What is trained."""
        ...


def start(
    workload: str, options: Options, run: Callable[[Any], Ended], argv: Sequence[str] | None = None
) -> None:
    """Read the command line, join the job and train.

    Where no launcher started this process, there is nobody who would tell of a missed target by the summary:
    then rank 0 says so, and the exit code is 1.

    Args:
        workload: its name.
        options: of its command line.
        run: trains a profile.
        argv: the words; None: those of the process.

    Raises:
        SystemExit: the target was missed, and no launcher will say so.
    """
    parser = argparse.ArgumentParser(prog=f"python -m hora.workloads.{workload}.train")
    options.add(parser)
    profile = options.profile(parser.parse_args(argv))
    hora.init()
    missed = run(profile).missed
    here = hora.context()
    if missed and here.settings.job is None:
        if hora.rank() == 0:
            print(f"hora: target not reached: {'; '.join(missed)}", file=sys.stderr)
        sys.exit(1)

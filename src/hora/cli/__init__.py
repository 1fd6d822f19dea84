"""The ``hora`` command. Each verb is one small module beside this one; no logic lives here.

A verb's module is imported only when the verb is chosen, so that ``hora --help`` stays fast.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import hora
from hora.core.errors import HoraError

__all__ = ["main"]

VERBS = {
    "run": "start a script on N workers and bring back how they ended",
    "verify": "say whether a script trains the same with N workers as with one, or why not",
    "chaos": "disturb a job, and say whether its result is that of the undisturbed one",
    "plan": "know the time, the memory and the price of a training before renting the cluster",
    "train": "train a workload to its target",
    "study": "train a workload many times, with one thing changed, and compare",
    "workloads": "list the workloads, their data and their targets",
    "mlperf": "check, score and compare trainings by the rules of MLPerf",
    "report": "write a run's report.html again",
    "trace": "say where a run's time went, and write its timeline for Perfetto",
    "checkpoint": "list checkpoints, check that they are whole, or export one to a file",
    "settings": "print every setting, its value and where it came from",
    "explain": "print the page about an error or a verdict",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Wrong use is 2, a failed job its first failing rank's code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hora",
        description="Distributed training from one worker to a thousand.",
        epilog="`hora VERB --help` tells more about one verb.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hora {hora.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == chosen:
            module = importlib.import_module(f"hora.cli.{verb}")
            module.configure(sub)
            sub.set_defaults(main=module.main)
    try:
        arguments = parser.parse_args(words)
        return int(arguments.main(arguments))
    except HoraError as error:
        print(f"hora: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a job has its own answer to Ctrl-C, or in a verb that runs none
        print("hora: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as with `hora settings | head -1`. Python would complain
        # again while it flushes at exit.
        sys.stdout = None
        return 141

"""Train SSD to its target: ``hora train ssd``, or ``hora run -n 2 -m hora.workloads.ssd.train``.

Every rank runs this file. What a training is made of is in config.py, one step of it in learner.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hora.workloads.scenes.train import run
from hora.workloads.ssd import options
from hora.workloads.ssd.learner import SSDLearner
from hora.workloads.start import start

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the words of a command line say: what every worker of ``hora train ssd`` runs.

    Raises:
        UsageError: a value out of its range.
        DataError: pictures that are missing or damaged.
        TrainingError: the loss became infinite or not a number.
    """
    start("ssd", options, functools.partial(run, workload="ssd", make=SSDLearner), argv)


if __name__ == "__main__":
    main()

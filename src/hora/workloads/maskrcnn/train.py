"""Train Mask R-CNN: ``hora train maskrcnn``, or ``hora run -n 2 -m hora.workloads.maskrcnn.train``.

Every rank runs this file. What a training is made of is in config.py, one step of it in learner.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hora.workloads.maskrcnn import options
from hora.workloads.maskrcnn.learner import MaskRCNNLearner
from hora.workloads.scenes.train import run
from hora.workloads.start import start

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the words of a command line say: what every worker of ``hora train maskrcnn`` runs.

    Raises:
        UsageError: a value out of its range.
        DataError: pictures that are missing or damaged.
        TrainingError: the loss became infinite or not a number.
    """
    start("maskrcnn", options, functools.partial(run, workload="maskrcnn", make=MaskRCNNLearner), argv)


if __name__ == "__main__":
    main()

"""Train SSD to its target: ``hora run -n 2 -m hora.workloads.ssd.train``.

Every rank runs this file. What a training is made of is in config.py, one step of it in learner.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import hora.torch as hora
from hora.workloads.scenes import data, options, record
from hora.workloads.scenes.loop import Outcome, train
from hora.workloads.ssd.config import PROFILES, SSDProfile
from hora.workloads.ssd.learner import SSDLearner

__all__ = ["main", "run"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the words of a command line say.

    Raises:
        UsageError: a value out of its range.
        DataError: pictures that are missing or damaged.
        TrainingError: the loss became infinite or not a number.
    """
    parser = argparse.ArgumentParser(prog="python -m hora.workloads.ssd.train", description=__doc__)
    options.add(parser, PROFILES)
    arguments = parser.parse_args(argv)
    profile = options.changed(PROFILES[arguments.profile], arguments)
    hora.init()
    options.tell(run(profile), profile)


def run(profile: SSDProfile) -> Outcome:
    """Train as the profile says; between ``init`` and ``shutdown``."""
    learner = SSDLearner(profile)
    hora.broadcast_parameters(learner.model, root_rank=0)
    record.begin(learner)
    pictures, test = data.load(profile.data)
    outcome = train(learner, pictures, test)
    record.finish(learner, test, outcome, workload="ssd")
    return outcome


if __name__ == "__main__":
    main()

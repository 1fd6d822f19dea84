"""A training of a detector from its first line to its last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import hora.torch as hora
from hora.mlperf import MLPerfLog
from hora.workloads import opening
from hora.workloads.loop import Outcome
from hora.workloads.scenes import data, record
from hora.workloads.scenes.config import Profile
from hora.workloads.scenes.learner import Learner
from hora.workloads.scenes.loop import train

__all__ = ["run"]

P = TypeVar("P", bound=Profile)


def run(profile: P, *, workload: str, make: Callable[[P], Learner]) -> Outcome:
    """Train as the profile says, and write down how it went; between ``init`` and ``shutdown``.

    Args:
        profile: what is trained.
        workload: its name, as in ``hora train NAME``.
        make: model and optimizer of a profile.
    """
    with MLPerfLog(opening.mlperf_path()) as log:
        opening.begin(workload, log, config=dataclasses.asdict(profile))
        learner = make(profile)
        hora.broadcast_parameters(learner.model, root_rank=0)
        opening.initialized(log)
        started = time.perf_counter()  # from here on training data may be touched
        pictures, test = data.load(profile.data)
        outcome = train(learner, pictures, test, log, started=started)
    record.finish(learner, test, outcome, workload=workload)
    return outcome

"""What a disturbance is said to have led to."""

from __future__ import annotations

from pathlib import Path

from hora.chaos.acts import Done
from hora.chaos.history import History
from hora.chaos.report import outcomes
from hora.chaos.schedule import Disturbance
from hora.core.rundir import RunDirectory


def test_a_verdict_that_found_no_room_on_the_full_disk_is_told(tmp_path: Path) -> None:
    """The run directory is on that disk: its verdicts.jsonl may lack what the console has shown."""
    full = Disturbance(
        number=1, kind="fill-disk", moment="save", anchor="step", count=4, after=0.0, choice=0.5, lasts=1.0
    )
    run = RunDirectory.create(tmp_path / "run")
    for told, kinds in ((1, ("checkpoint-failed",)), (0, ())):
        done = Done(one=full, time=1.0, step=4, what="the disk is filled with 9 MB", failed_saves=told)
        (outcome,) = outcomes([done], run, History())
        assert outcome.verdicts == kinds

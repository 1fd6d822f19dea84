"""What rank 0 finds about checkpoints is passed on, each finding once."""

from __future__ import annotations

from tests.guard.stage import Stage


def record(kind: str, key: str, step: int = 5) -> dict[str, object]:
    return {"kind": kind, "step": step, "text": f"Step {step}.", "advice": "Free some space.", "key": key}


def test_each_finding_is_told_once_and_stops_nothing() -> None:
    stage = Stage(2)
    stage.post[0] += [record("checkpoint-failed", "1"), record("checkpoint-failed", "1", 6)]
    stage.post[0] += [record("checkpoint-damaged", "1"), record("checkpoint-failed", "2", 7)]
    stage.look()
    told = [(verdict.kind, verdict.step, verdict.ranks, stop) for verdict, stop in stage.desk.verdicts]
    assert told == [
        ("checkpoint-failed", 5, [0], False),
        ("checkpoint-damaged", 5, [0], False),
        ("checkpoint-failed", 7, [0], False),
    ]
    assert stage.desk.verdicts[0][0].paragraph.startswith("A checkpoint could not be written. Step 5.\nFree")


def test_a_broken_record_is_ignored() -> None:
    stage = Stage(2)
    stage.post[0].append({"kind": "checkpoint-failed", "step": "x"})
    stage.look()
    assert stage.desk.verdicts == []
    assert len(stage.desk.complaints) == 1

"""The plan is passed on; one that cannot be ends the job."""

from __future__ import annotations

from tests.guard.stage import Stage


def test_the_plan_is_told_once() -> None:
    stage = Stage(2)
    for _ in range(2):
        stage.post[0].append({"kind": "plan", "text": "Plan: global batch 32."})
    stage.look()
    [(verdict, stop)] = stage.desk.verdicts
    assert (verdict.kind, verdict.text, stop) == ("plan", "Plan: global batch 32.", False)


def test_an_impossible_plan_stops_the_job() -> None:
    stage = Stage(2)
    for rank in (0, 1):
        record = {"kind": "impossible", "text": "Too long.", "advice": "Shorten it.", "where": "t.py:1"}
        stage.post[rank].append(record | {"stop": True})
    stage.look()
    assert (stage.verdict.kind, stage.verdict.ranks, stage.verdict.where) == (
        "impossible-plan",
        [0, 1],
        "t.py:1",
    )

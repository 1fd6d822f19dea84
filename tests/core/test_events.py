"""Timeline events and the merged Chrome trace."""

import json
from pathlib import Path

import pytest

from hora.core.events import Timeline, merge
from hora.core.rundir import RunDirectory


def test_ranks_merge_into_one_trace_on_one_clock(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    for rank, offset in ((0, 100.0), (1, 100.5)):
        timeline = Timeline(run.events(rank), rank=rank)
        timeline.add("forward", offset, offset + 0.25)
        timeline.add("allreduce", offset + 0.25, offset + 0.375, lane="wait", details={"bytes": 8})
        timeline.close()
    path = merge(run)
    assert path == run.timeline
    trace = json.loads(run.timeline.read_text())["traceEvents"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert spans == [
        (0, "forward", 0.0, 250_000.0),
        (0, "allreduce", 250_000.0, 125_000.0),
        (1, "forward", 500_000.0, 250_000.0),
        (1, "allreduce", 750_000.0, 125_000.0),
    ]
    names = {(e["pid"], e["name"], e["args"]["name"]) for e in trace if e["ph"] == "M"}
    assert {(0, "process_name", "rank 0"), (1, "thread_name", "wait")} <= names
    assert next(e for e in trace if e["name"] == "allreduce")["args"] == {"bytes": 8}


def test_spans_nest_and_marks_are_instants(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    timeline = Timeline(run.events(0), rank=0)
    with timeline.span("step", number=1):
        timeline.mark("checkpoint")
    timeline.close()
    merge(run)
    by_name = {e["name"]: e for e in json.loads(run.timeline.read_text())["traceEvents"]}
    assert by_name["checkpoint"]["ph"] == "i"
    assert by_name["step"]["ts"] <= by_name["checkpoint"]["ts"]
    assert by_name["step"]["args"] == {"number": 1}


def test_a_switched_off_timeline_writes_nothing(tmp_path: Path) -> None:
    timeline = Timeline(None, rank=0)
    with timeline.span("step"):
        timeline.mark("x")
    timeline.close()
    assert not timeline.enabled
    assert not any(tmp_path.iterdir())


def test_the_limit_is_counted_and_told(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    timeline = Timeline(run.events(0), rank=0, limit=3)
    for _ in range(10):
        timeline.mark("x")
    assert timeline.dropped == 7
    timeline.close()
    lines = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert [line["name"] for line in lines] == ["x", "x", "x", "timeline limit reached"]
    assert lines[-1]["args"] == {"dropped": 7}


def test_a_half_line_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    timeline = Timeline(run.events(0), rank=0)
    timeline.mark("x")
    timeline.close()
    with run.events(0).open("a") as file:
        file.write('{"name": "ha')
    merge(run)
    assert [e["name"] for e in json.loads(run.timeline.read_text())["traceEvents"] if e["ph"] == "i"] == ["x"]


def test_a_timeline_that_cannot_be_written_ends_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(tmp_path / "gone" / "rank-0.jsonl", rank=0)
    timeline.mark("x")
    timeline.flush()
    timeline.mark("y")
    timeline.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the timeline ends here" in said
    assert "No such file or directory" in said


def test_no_events_no_trace(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    assert merge(run) is None
    assert not run.timeline.exists()

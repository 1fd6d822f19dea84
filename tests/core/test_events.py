"""Timeline events, how they are read back, and the trace made of them."""

import json
import time
from pathlib import Path

import pytest

from hora.core.events import Event, Timeline, read_events
from hora.core.rundir import RunDirectory
from hora.core.trace import merge


@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_ranks_merge_into_one_trace_on_one_clock(tmp_path: Path, ahead: float) -> None:
    """Both leave the all-reduce together, also when the clock of rank 1 is half a second ahead."""
    run = RunDirectory.create(tmp_path / "a")
    for rank, late, offset in ((0, 0.0, 100.0), (1, 0.125, 100.0 + ahead)):
        timeline = Timeline(run.events(rank), rank=rank)
        timeline.add("forward", offset, offset + 0.25 + late)
        timeline.add("allreduce", offset + 0.25 + late, offset + 0.5, details={"bytes": 8})
        timeline.close()
    path = merge(run)
    assert path == run.timeline
    trace = json.loads(run.timeline.read_text())["traceEvents"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert spans == [
        (0, "forward", 0.0, 250_000.0),
        (0, "allreduce", 250_000.0, 250_000.0),
        (1, "forward", 0.0, 375_000.0),
        (1, "allreduce", 375_000.0, 125_000.0),
    ]
    names = {(e["pid"], e["name"], e["args"]["name"]) for e in trace if "name" in e["args"]}
    assert {(0, "process_name", "rank 0"), (1, "thread_name", "main")} <= names
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


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "rank-0.jsonl", rank=0, limit=2)
    odd = 'a "name",\n with \u2028 and ü'
    timeline.add(odd, 1796053641.5096846, 1796053642.25, lane=odd, details={"x": [1, None], odd: "ü"})
    timeline.add("later", 1796053643.0, 1796053643.0)
    timeline.mark("too many")
    timeline.close()
    recording = read_events(tmp_path / "rank-0.jsonl")
    assert recording.events == [
        Event(odd, odd, 1796053641.5096846, 1796053642.25, {"x": [1, None], odd: "ü"}),
        Event("later", "main", 1796053643.0, 1796053643.0, {}),
    ]
    assert (recording.dropped, recording.malformed) == (1, 0)


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    good = '{"name": "x", "lane": "main", "start": 1.0, "stop": 2.0, "args": {}}'
    bad = [
        '{"name": "ha',
        "[]",
        "null",
        "7",
        "[" * 100_000,
        good.replace("2.0", "NaN"),
        good.replace("2.0", "1e999"),
        good.replace("2.0", "true"),
        good.replace("2.0", "1" * 400),
        good.replace('"x"', "3"),
        good.replace("{}", "[]"),
        good.replace('"stop"', '"step"'),
    ]
    file.write_text("\n".join([*bad, good, good.replace("2.0", "0.5"), good.replace("2.0", "2")]) + "\n")
    recording = read_events(file)
    assert recording.malformed == len(bad)
    # A span that would end before it began, because the clock was set back, is an instant.
    assert [(event.start, event.stop) for event in recording.events] == [(1.0, 2.0), (1.0, 1.0), (1.0, 2.0)]
    assert read_events(tmp_path / "none").events == []


def test_events_do_not_stay_in_memory_for_long(tmp_path: Path) -> None:
    """A rank that is killed may have had few and long steps."""
    timeline = Timeline(tmp_path / "rank-0.jsonl", rank=0)
    now = time.time()
    timeline.add("x", now, now + 1)
    assert read_events(tmp_path / "rank-0.jsonl").events == []
    timeline.add("x", now + 1, now + 3)
    assert len(read_events(tmp_path / "rank-0.jsonl").events) == 2


def test_spans_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    """The viewers drop a span that begins in another one and ends behind it."""
    run = RunDirectory.create(tmp_path / "a")
    timeline = Timeline(run.events(0), rank=0)
    for name, start, stop in (("a", 0, 10), ("b", 5, 15), ("in a", 2, 4), ("c", 12, 20), ("in c", 15, 16)):
        timeline.add(name, start, stop, lane="gradients")
    timeline.close()
    merge(run)
    trace = json.loads(run.timeline.read_text())["traceEvents"]
    rows = {event["name"]: event["tid"] for event in trace if event["ph"] == "X"}
    assert rows["a"] == rows["in a"] == rows["c"] == rows["in c"] != rows["b"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {rows["a"]: "gradients", rows["b"]: "gradients 2"}

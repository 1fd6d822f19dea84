"""Where the time went: from timelines whose answer is known, and from whatever else a run leaves."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.cli import main
from hora.core.errors import RunDirectoryError
from hora.core.events import Event, Recording, Timeline
from hora.core.rundir import RunDirectory
from hora.report import account
from hora.report._account import ranks_text
from hora.report._shares import Shares, mean_shares, shares, slowest

START = 1_790_000_000.0


def event(name: str, start: float, stop: float, lane: str = "main", **args: Any) -> Event:
    return Event(name, lane, START + start, START + stop, args)


def accounted(*events: Event) -> dict[str, float]:
    found = shares(Recording(events=list(events)))
    return {name: round(value, 5) for name, value in found.parts().items()}


STEP = [
    event("wait for data", 2.0, 3.0, "data"),
    event("average gradients", 4.0, 6.0, "gradients", bytes=8),
    event("wait for gradients", 5.0, 6.0),
    event("backward", 4.0, 6.0),
    event("optimizer", 6.0, 7.0),
    event("mean", 7.0, 7.5, "collectives"),
    event("step", 3.0, 8.0, "steps"),
]


def test_one_step() -> None:
    """From 0 to 10: ready at 2, a batch at 3, the step over at 8; 1 s of it for gradients, 0.5 for a mean."""
    found = accounted(event("init", 0, 0), *STEP, event("shutdown", 10, 10))
    assert found == {"compute": 3.5, "communication": 1.5, "data": 1.0, "other": 4.0}


def test_what_runs_beside_the_script_does_not_count() -> None:
    beside = [
        event("allreduce", 3.0, 8.0, "collectives", started=0.25, waited=0.5),  # at 3 and before 8
        event("allreduce", 3.0, 8.0, "background"),
        event("average gradients", 3.0, 8.0, "gradients"),
        event("step", 3.0, 8.0, "steps"),
    ]
    assert accounted(*beside) == {"compute": 4.25, "communication": 0.75, "data": 0.0, "other": 0.0}


def test_a_wait_inside_another_counts_once() -> None:
    nested = [
        event("wait for data", 0.0, 4.0, "data"),
        event("barrier", 1.0, 2.0, "collectives"),  # a loader that synchronizes
        event("mean", 1.5, 2.5, "collectives"),
        event("wait for data", 0.5, 3.5, "data"),
        event("step", 4.0, 5.0, "steps"),
        event("step", 0.0, 5.0, "steps"),
    ]
    assert accounted(*nested) == {"compute": 1.0, "communication": 1.5, "data": 2.5, "other": 0.0}


def test_without_a_loader_steps_go_from_one_update_to_the_next() -> None:
    events = [event("init", 0, 0)]
    for at in (2.0, 4.0, 6.0):
        events += [event("wait for gradients", at - 1.0, at - 0.5), event("optimizer", at - 0.5, at)]
    found = shares(Recording(events=[*events, event("shutdown", 9, 9)]))
    # 0.5 s of the first update and 1.5 s of each of the two steps behind it.
    assert (found.compute, found.communication, found.data, found.other) == (3.5, 1.5, 0.0, 4.0)
    assert not found.data_seen


def test_old_timelines_know_neither_steps_nor_optimizers() -> None:
    events = [one for at in (2.0, 4.0, 6.0) for one in (event("wait for gradients", at - 0.5, at),)]
    assert accounted(*events) == {"compute": 3.0, "communication": 1.5, "data": 0.0, "other": 0.0}
    negotiated = [
        event("init", 0, 0),
        event("allreduce", 2, 5, "background"),
        event("wait for allreduce.w", 4, 5),
        event("allreduce", 6, 8, "background"),
        event("shutdown", 9, 9),
    ]
    assert accounted(*negotiated) == {"compute": 5.0, "communication": 1.0, "data": 0.0, "other": 3.0}


def test_a_run_that_ended_before_its_first_step_did_not_compute() -> None:
    events = [
        event("init", 0, 0),
        event("broadcast_parameters", 2, 3, "collectives"),
        event("shutdown", 9, 9),
    ]
    assert accounted(*events) == {"compute": 0.0, "communication": 1.0, "data": 0.0, "other": 8.0}


LANES = [
    ("wait for data", "data"),
    ("wait for gradients", "main"),
    ("backward", "main"),
    ("optimizer", "main"),
    ("step", "steps"),
    ("allreduce", "collectives"),
    ("average gradients", "gradients"),
    ("something else", "elsewhere"),
]
moments = st.floats(0, 1e4, allow_subnormal=False)
any_events = st.lists(
    st.builds(
        lambda kind, start, long, args: event(kind[0], start, start + long, kind[1], **args),
        st.sampled_from(LANES),
        moments,
        st.floats(0, 100),
        st.sampled_from(
            [{}, {"started": 1.0, "waited": 2.0}, {"started": -5.0, "waited": 1e9}, {"started": 3}]
        ),
    ),
    max_size=30,
)


@given(any_events)
def test_the_parts_add_up_to_the_wall_time(events: list[Event]) -> None:
    found = shares(Recording(events=events))
    assert min(found.parts().values()) >= 0.0
    wall = max((one.stop for one in events), default=0.0) - min((one.start for one in events), default=0.0)
    assert found.wall == wall
    assert math.isclose(math.fsum(found.parts().values()), wall, rel_tol=1e-12, abs_tol=1e-9)


@given(any_events, st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(events: list[Event], random: Any) -> None:
    again = [*events, *(one for one in events if one.name == "step")]
    random.shuffle(again)
    assert shares(Recording(events=again)) == shares(Recording(events=events))


@given(st.lists(any_events, min_size=1, max_size=4))
def test_the_mean_adds_up_too(ranks: list[list[Event]]) -> None:
    mean = mean_shares([shares(Recording(events=events)) for events in ranks])
    assert math.isclose(math.fsum(mean.parts().values()), mean.wall, rel_tol=1e-9, abs_tol=1e-9)


def test_the_slow_rank_is_named_by_its_own_work() -> None:
    def rank(compute: float, data: float) -> Shares:
        return Shares(wall=10.0, compute=compute, communication=10.0 - compute - data, data=data, other=0.0)

    sentence = slowest({0: rank(5, 1), 1: rank(5, 4), 2: rank(5.5, 0.5)})
    assert sentence == "Rank 1 computes and loads for 9 s, the others for 6 s (median): they wait for it."
    assert slowest({0: rank(5, 1), 1: rank(5, 1.5), 2: rank(6, 0)}) == ""  # 8 % longer
    assert slowest({0: rank(0.2, 0), 1: rank(0.3, 0)}) == ""  # of 10 s
    assert slowest({0: rank(5, 1)}) == ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0 and 1"), ([0, 2, 4, 5, 6, 7], "ranks 0, 2 and 4 to 7")],
)
def test_lists_of_ranks(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


# --- the verb ------------------------------------------------------------------------------------------


def make(
    path: Path, *, workers: int = 2, steps: int = 20, offset: float = 0.0, slow: int | None = None
) -> RunDirectory:
    """Steps of 60 ms; the clocks of all ranks but the first are ``offset`` ahead."""
    run = RunDirectory.create(path, about={"name": path.name, "workers": workers})
    for rank in range(workers):
        timeline = Timeline(run.events(rank), rank=rank)
        shift = START + (offset if rank else 0.0)

        def add(name: str, start: float, stop: float, lane: str = "main", **details: Any) -> None:
            timeline.add(name, shift + start, shift + stop, lane=lane, details=details)  # noqa: B023

        add("init", 0.0, 0.0)
        for step in range(steps):
            at = 1.0 + 0.06 * step
            ready = at + (0.05 if rank == slow else 0.03) + 1e-5 * ((7 * step + rank) % 5)
            add("wait for data", at, at + 0.002, "data")
            add("average gradients", ready, at + 0.055, "gradients", bytes=800, cycle=step)
            add("wait for gradients", ready, at + 0.055)
            add("optimizer", at + 0.055, at + 0.058)
            add("step", at + 0.002, at + 0.06, "steps")
        timeline.close()
    return run


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", slow=1)
    assert main(["trace", str(run.path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["rank", "wall", "compute", "communication", "data", "other"]
    # 20 steps: 2 ms of data each, and 25 or 5 of the other 58 ms waiting; a second before the first.
    assert lines[1][:6] == ["0", "2.20", "s", "0.66", "s", "30"]
    assert lines[2][:6] == ["1", "2.20", "s", "1.06", "s", "48"]
    assert lines[3][0] == "mean"
    assert "Rank 1 computes and loads for 1.1 s, the others for 0.7 s (median)" in out
    assert "The ranks' clocks agree" in out
    trace = json.loads(run.timeline.read_text())
    assert sum(one["ph"] == "X" for one in trace["traceEvents"]) == 2 * 20 * 5
    picture = ElementTree.fromstring((run.path / "timeline.svg").read_text())
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "\x1b" not in out


def test_json_and_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", offset=3.0)
    assert main(["trace", str(run.path), "--json", "-o", str(tmp_path / "t.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trace"], found["picture"]) == (str(tmp_path / "t.json"), str(tmp_path / "t.svg"))
    assert not run.timeline.exists()
    first, second = found["ranks"]
    assert first["clock_offset_s"] == first["clock_error_s"] == 0.0
    assert abs(second["clock_offset_s"] - 3.0) < 1e-4
    parts = ("compute_s", "communication_s", "data_s", "other_s")
    assert math.isclose(sum(second[name] for name in parts), second["wall_s"], rel_tol=1e-9)
    ends = {
        one["pid"]: one["ts"] + one["dur"]
        for one in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if one["name"] == "average gradients"
    }
    assert abs(ends[0] - ends[1]) < 100  # microseconds


def test_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", workers=4)
    run.events(2).unlink()
    run.events(3).write_text("")
    text = run.events(1).read_text()
    run.events(1).write_text(text[: len(text) // 2])
    run.run_json.write_text('{"workers": 4, "na')
    assert main(["trace", str(run.path)]) == 0
    assert "1 line of events could not be read and is left out." in capsys.readouterr().out
    run.run_json.write_text('{"workers": 4}')
    assert main(["trace", str(run.path)]) == 0
    assert "No events of ranks 2 and 3 of 4" in capsys.readouterr().out


def test_what_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    run = RunDirectory.create(tmp_path / "run")
    assert main(["trace", str(run.path)]) == 2
    assert "holds no timeline: no rank has written an event" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match="hora.torch.init"):
        account(run)
    run = make(tmp_path / "other")
    (run.path / "timeline.json.new").mkdir()
    assert main(["trace", str(run.path)]) == 2
    assert "-o FILE" in capsys.readouterr().err


def test_limits_and_scripts_without_a_loader_are_told(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    timeline = Timeline(run.events(0), rank=0, limit=3)
    for at in range(8):
        timeline.add("optimizer", START + at, START + at + 0.5)
    timeline.close()
    found = account(run)
    unseen, cut = found.notes()
    assert unseen.startswith("Waiting for data was not recorded and counts as compute")
    assert cut.startswith("The timeline of rank 0 ends before the run")
    assert "up to 5 later events were not kept" in cut
    assert found.ranks[0].wall == 2.5


def test_64_ranks_quickly(tmp_path: Path) -> None:
    run = make(tmp_path / "run", workers=64, steps=300)
    start = time.process_time()
    found = account(run)
    found.write(run.timeline)
    found.write_picture(tmp_path / "picture.svg")
    assert time.process_time() - start < 4.0  # 96,000 events; 0.9 s on an idle machine
    assert len(found.ranks) == 64
    assert found.chart().count('class="stack"') == 64


def test_many_ranks_share_bars(tmp_path: Path) -> None:
    run = make(tmp_path / "run", workers=130, steps=1)
    chart = account(run).chart()
    assert chart.count('class="stack"') == math.ceil(130 / 3)
    assert "rank 0–2: compute" in chart

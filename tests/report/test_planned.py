"""What the plan said, beside what happened."""

import json
from pathlib import Path

import pytest

from hora.core.errors import UsageError
from hora.report import checked_plan
from hora.report._planned import rows
from hora.report._read import RunData

PLAN = {"step": {"low": 0.18, "value": 0.2, "high": 0.23}, "rate": {"low": 280, "value": 320, "high": 350}}


def data(folder: Path, seconds: float) -> RunData:
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "events").mkdir()
    args = {"global_batch": 64, "backward_passes": 1}
    events = [{"name": "plan", "lane": "main", "start": 0, "stop": 0, "args": args}]
    events += [{"name": "step", "lane": "steps", "start": i, "stop": i + seconds} for i in range(10)]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events" / "rank-0.jsonl").write_text(lines + '{"name": "st')  # killed while it wrote
    return RunData(path=folder)


def test_a_step_inside_and_one_outside_of_the_interval(tmp_path):
    (inside, outside) = (tmp_path / "a", tmp_path / "b")
    for folder, seconds in ((inside, 0.19), (outside, 0.4)):
        folder.mkdir()
        step, rate = rows(data(folder, seconds))
        assert step[0] == "time of a step"
        assert ("inside" in step[3]) == (folder is inside)
        assert rate[2] == f"{64 / seconds:,.4g}"


@pytest.mark.parametrize("workers", [2, 4])
def test_a_run_that_is_not_the_planned_one_says_so(tmp_path, workers):
    found = data(tmp_path, 0.2)
    found.about["world"] = {"size": workers}
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "gpus": 2, "batch": 128}))
    size, batch, step, _ = rows(found)
    assert size[:3] == ("workers", "2", str(workers))
    assert size[3].startswith("as planned" if workers == 2 else "not as planned")
    assert batch[1:3] == ("128", "64")
    assert batch[3].startswith("not as planned")
    assert step[0] == "time of a step"


def test_without_steps_the_plan_still_shows(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert [row[2] for row in rows(RunData(path=tmp_path))] == ["not recorded", "not recorded"]
    (tmp_path / "plan.json").write_text("{")
    broken = RunData(path=tmp_path)
    assert rows(broken) == []
    assert broken.problems


@pytest.mark.parametrize("text", ["", "[]", '{"step": 3}', '{"step": {"low": 2, "value": 1, "high": 3}}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"hora plan \.\.\. --json"):
        checked_plan(path)

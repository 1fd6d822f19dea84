"""A profile from a run directory: its step comes back, two workers take more than half, errors tell why."""

import json
from pathlib import Path

import pytest

from hora.cli import main
from hora.core.errors import UsageError
from hora.plan import profile
from hora.plan.probe import Probe


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of two cores that are a quarter slower side by side and move 8 GB/s each."""
    monkeypatch.setattr(profile, "cores", lambda: 2)
    monkeypatch.setattr(profile, "probe", lambda workers: Probe(products=0.8, streams=0.8, bandwidth=8e9))


def run_directory(folder: Path, *, workers: int = 1, steps: int = 20, **plan: object) -> Path:
    path = folder / "run"
    (path / "events").mkdir(parents=True)
    about = {"name": "mine", "world": {"size": workers}, "workers": workers}
    (path / "run.json").write_text(json.dumps(about))
    known = {"global_batch": 64, "backward_passes": 1, "gradient_bytes": 8e6, "tensors": 50, "threads": 1}
    args = {**known, "device": "cpu", **plan}
    events = [{"name": "plan", "lane": "main", "start": 0.0, "stop": 0.0, "args": args}]
    for index in range(steps):
        seconds = 0.5 if index == 0 else 0.2 + 0.002 * (index % 3)
        events.append({"name": "step", "lane": "steps", "start": index, "stop": index + seconds})
    (path / "events" / "rank-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.mark.usefixtures("two_cores")
def test_one_worker_takes_what_was_measured_and_two_more_than_half(tmp_path, capsys):
    path = run_directory(tmp_path)
    times = {}
    for gpus in (1, 2):
        words = ["plan", "--profile", str(path), "--gpus", str(gpus), "--batch", "64", "--json"]
        assert main(words) == 0
        times[gpus] = json.loads(capsys.readouterr().out)["step"]["value"]
    assert times[1] == pytest.approx(0.202, rel=0.02)
    slower = 0.003 + (0.202 - 0.003) / 2  # launches stay, samples are halved
    reduced = 6 * 8e6 / 8e9  # six passes over memory
    assert times[2] == pytest.approx(1.25 * slower + reduced, rel=0.03)


@pytest.mark.parametrize(("fixed", "batch"), [(True, 64), (False, 128)])
@pytest.mark.usefixtures("two_cores")
def test_two_workers_share_a_global_batch_that_the_script_names(tmp_path, capsys, fixed, batch):
    path = run_directory(tmp_path, fixed_batch=fixed)
    assert main(["plan", "--profile", str(path), "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == batch


@pytest.mark.usefixtures("two_cores")
def test_workers_that_do_not_divide_the_scripts_global_batch_are_refused(tmp_path, capsys):
    path = run_directory(tmp_path, global_batch=63)
    assert main(["plan", "--profile", str(path), "--gpus", "2"]) == 2
    assert "not divided by 2 workers" in capsys.readouterr().err


@pytest.mark.usefixtures("two_cores")
def test_each_worker_of_a_sweep_has_the_samples_of_the_profile(tmp_path, capsys):
    assert main(["plan", "--profile", str(run_directory(tmp_path)), "--sweep", "gpus=1..2", "--json"]) == 0
    assert [one["batch"] for one in json.loads(capsys.readouterr().out)] == [64, 128]


@pytest.mark.usefixtures("two_cores")
def test_a_gpus_profile_is_carried_to_another_machine(tmp_path, capsys):
    path = run_directory(tmp_path, device="cuda", gpu="NVIDIA A100-SXM4-80GB")
    values = {}
    for name in ("dgx-a100", "dgx-h100"):
        words = ["plan", "--profile", str(path), "--on", name, "--gpus", "1", "--batch", "64", "--json"]
        assert main(words) == 0
        values[name] = json.loads(capsys.readouterr().out)["step"]
    assert values["dgx-a100"]["value"] == pytest.approx(0.202, rel=0.02)
    ratio = values["dgx-a100"]["value"] / values["dgx-h100"]["value"]
    assert 3350 / 2039 < ratio < 989.4 / 312
    widths = [one["high"] / one["low"] for one in values.values()]
    assert widths[1] > widths[0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"workers": 2}, "hora run -n 1"),
        ({"steps": 2}, "2 steps were recorded"),
        ({"global_batch": None}, "global_batch="),
        ({"device": "cuda", "gpu": "NVIDIA T4"}, "NVIDIA T4"),
    ],
)
@pytest.mark.usefixtures("two_cores")
def test_a_run_that_is_no_profile_says_why(tmp_path, made, message):
    with pytest.raises(UsageError, match=message):
        profile.read(run_directory(tmp_path, **made))


def test_no_run_directory_at_all(tmp_path):
    with pytest.raises(UsageError, match="hora run -n 1"):
        profile.read(tmp_path / "none")


@pytest.mark.usefixtures("two_cores")
def test_a_cpus_profile_says_nothing_of_gpus(tmp_path, capsys):
    path = run_directory(tmp_path)
    assert main(["plan", "--profile", str(path), "--on", "dgx-a100"]) == 2
    assert "measured on CPUs" in capsys.readouterr().err


def test_the_probe_measures_this_host():
    found = profile.probe(2)
    assert 0 < found.products <= 1
    assert 0 < found.streams <= 1
    assert 1e8 < found.bandwidth < 1e12
    assert found.slowdown >= 1

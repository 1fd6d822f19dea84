"""The table and the page of figures, from results that are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import summary
from _interleave import Report, Spread

PLACE = "# Performance\n\nWords.\n\n<!-- figures: begin -->\nold\n<!-- figures: end -->\n\nMore words.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    collectives = Report("collectives", base="Gloo")
    for size, gloo, ours in ((4, 8.0, 1.0), (2**20, 12.0, 2.0), (2**24, 9.0, 3.0), (2**28, 8.0, 4.0)):
        case: dict[str, str | int] = {"collective": "all-reduce", "ranks": 2, "bytes": size}
        collectives.add(case, {"copy": [2.0] * 3, "Gloo": [gloo] * 3, "Hora": [ours] * 3})
    collectives.leave_out("MPI", "not installed")
    collectives.finish(tmp_path / "collectives.json")
    training = Report("train_vs_peers", base="DDP")
    step = {"one worker": [3.0] * 3, "DDP": [5.0, 6.0, 7.0], "Hora": [4.0, 4.0, 4.0]}
    training.add({"model": "transformer", "ranks": 2, "measure": "step"}, step)
    memory = {"one worker": [8e6], "DDP": [8e6], "Accelerate": [8e6], "Hora": [8e6], "Hora, sharded": [4e6]}
    case = {"model": "transformer", "ranks": 2, "measure": "optimizer memory"}
    training.add(case, memory, unit="bytes")
    training.finish(tmp_path / "train_vs_peers.json")
    scaling = Report("scaling", base="apart")
    for ranks, parameters in ((1, 100), (2, 100), (2, 1000)):
        scaling.add({"ranks": ranks, "parameters": parameters}, {"apart": [1.0], "Hora": [2.0], "DDP": [4.0]})
    scaling.finish(tmp_path / "scaling.json")
    start = Report("start_up", base="torchrun")
    start.add({"measure": "first step done", "ranks": 2}, {"torchrun": [4.0], "hora run": [2.0]})
    start.finish(tmp_path / "start_up.json")
    return tmp_path


def found(folder: Path) -> dict[tuple[str, str, str], summary.Line]:
    lines = summary.summarised(summary.read(folder))
    return {(line.measure, line.ours, line.peer): line for line in lines}


def test_sizes_of_collectives_are_summed_up_by_their_lowest_and_highest_ratio(folder: Path) -> None:
    lines = found(folder)
    small = lines["all-reduce, 2 ranks, 4 B", "Hora", "Gloo"]
    below = lines["all-reduce, 2 ranks, 1 MiB", "Hora", "Gloo"]
    large = lines["all-reduce, 2 ranks, 16 MiB to 256 MiB", "Hora", "Gloo"]
    assert (small.ratio, small.aim) == ((8.0, 8.0, 8.0), 5.0)
    assert (below.ratio, below.aim) == ((6.0, 6.0, 6.0), 5.0)
    assert (large.ratio, large.aim) == ((2.5, 2.0, 3.0), 2.0)
    assert ("all-reduce, 2 ranks, 4 B", "Hora", "copy") not in lines
    copy = lines["all-reduce, 2 ranks, 16 MiB to 256 MiB", "Hora", "copy"]
    assert copy.ratio is not None
    assert copy.ratio.low == 0.5


def test_calls_of_the_same_benchmark_are_put_together(folder: Path) -> None:
    more = Report("collectives", base="Gloo")
    more.add({"collective": "all-reduce", "ranks": 8, "bytes": 4}, {"Gloo": [3.0], "Hora": [2.0]})
    more.leave_out("other", "too slow")
    more.finish(folder / "collectives-8.json")
    lines = found(folder)
    eight = lines["all-reduce, 8 ranks, 4 B", "Hora", "Gloo"]
    assert eight.ratio is not None
    assert (eight.ratio.median, eight.aim) == (1.5, 1.0)
    assert ("all-reduce, 2 ranks, 4 B", "Hora", "Gloo") in lines
    assert summary.read(folder).files["collectives"]["left_out"] == {
        "MPI": "not installed",
        "other": "too slow",
    }


def test_training_is_compared_with_each_peer(folder: Path) -> None:
    lines = found(folder)
    ddp = lines["transformer, 2 ranks, step", "Hora", "DDP"]
    assert (ddp.ratio, ddp.aim) == ((1.5, 1.375, 1.625), 1.25)
    # Two ranks take 4 s for what one takes 3 s for half of.
    assert lines["transformer, 2 ranks, step, samples per second", "Hora", "one worker"].ratio.median == 1.5
    sharded = lines["transformer, 2 ranks, optimizer memory", "Hora, sharded", "DDP"]
    assert (sharded.ratio.median, sharded.values) == (2.0, "4 MB : 8 MB")
    assert sharded.aim == pytest.approx(1.905, abs=1e-3)
    assert ("transformer, 2 ranks, optimizer memory", "Hora", "Accelerate") not in lines


def test_the_guards_cost_is_its_own_estimate_and_sharding_has_its_aim_at_any_size(tmp_path: Path) -> None:
    cost = Report("guard_cost", base="without the guard")
    ratios = {"with the guard": Spread(0.995, 0.98, 1.0)}
    case: dict[str, str | int] = {"model": "resnet", "ranks": 2, "measure": "step"}
    cost.add(case, {"without the guard": [1.0] * 3, "with the guard": [1.1] * 3}, ratios=ratios)
    cost.finish(tmp_path / "guard_cost.json")
    memory = Report("train_vs_peers", base="DDP")
    case = {"model": "transformer", "ranks": 4, "measure": "optimizer memory"}
    memory.add(case, {"DDP": [8e6], "Hora, sharded": [2.2e6]}, unit="bytes")
    memory.finish(tmp_path / "train_vs_peers-4-ranks.json")
    lines = found(tmp_path)
    line = lines["resnet, 2 ranks, step", "with the guard", "without the guard"]
    assert (line.ratio, line.aim) == (ratios["with the guard"], pytest.approx(0.990, abs=1e-3))
    sharded = lines["transformer, 4 ranks, optimizer memory", "Hora, sharded", "DDP"]
    assert sharded.aim == pytest.approx(3.81, abs=1e-2)
    assert summary.cells([line])[1][0][-1] == "yes"
    assert summary.cells([sharded])[1][0][-1] == "no"  # 2.2 MB are 10 % more than a quarter


def test_the_table_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["summary.py", str(folder)])
    assert summary.main() == 0
    printed = capsys.readouterr().out
    assert "first step done, 2 ranks" in printed
    assert "left out of collectives: MPI: not installed" in printed


def test_a_folder_without_results_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["summary.py", str(tmp_path)])
    assert summary.main() == 1
    assert "Write: make bench" in capsys.readouterr().out


def test_the_page_is_filled(folder: Path) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("plots need matplotlib; write: pip install 'hora[bench]'")
    page = folder / "page.md"
    page.write_text(PLACE)
    states = {"quick": True, "parts": {"guard_cost": {"seconds": 1.0, "reason": "exit code 1: it crashed"}}}
    (folder / "parts.json").write_text(json.dumps(states))
    (folder / "page").mkdir()
    (folder / "page" / "old.svg").write_text("<svg/>")
    # matplotlib leaves files open, so not in this process.
    command = [sys.executable, summary.__file__, str(folder), "--page", str(page)]
    subprocess.run(command, check=True, capture_output=True)
    text = page.read_text()
    assert text.startswith("# Performance\n\nWords.\n")
    assert text.endswith("<!-- figures: end -->\n\nMore words.\n")
    assert "old" not in text
    assert (
        "| transformer, 2 ranks, step | Hora | DDP | 4.00 s : 6.00 s | 1.50 | 1.38 | 1.62 | 1.25 | yes |"
        in text
    )
    assert "| What the guard costs |  |  | not measured |" in text
    assert "- Not measured: What the guard costs: exit code 1: it crashed.\n" in text
    assert "- Not measured: How fast the guard judges: it was not run.\n" in text
    assert "| collectives |  | MPI | not measured |" in text
    assert "Quick figures" in text
    plots = {plot: plot.read_bytes() for plot in (folder / "page").iterdir()}
    names = ["collectives", "optimizer-memory", "scaling", "start_up", "train_vs_peers"]
    assert sorted(plot.stem for plot in plots) == names
    for plot, drawn in plots.items():
        assert f"(page/{plot.name})" in text
        assert b"<svg" in drawn
        assert b"prefers-color-scheme: dark" in drawn
    subprocess.run(command, check=True, capture_output=True)
    assert page.read_text() == text  # filling it again changes nothing
    assert {plot: plot.read_bytes() for plot in plots} == plots


def test_a_page_without_a_place_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = folder / "page.md"
    page.write_text("# Performance\n")
    monkeypatch.setattr("sys.argv", ["summary.py", str(folder), "--page", str(page)])
    with pytest.raises(SystemExit, match="has no place for figures"):
        summary.main()
    assert page.read_text() == "# Performance\n"

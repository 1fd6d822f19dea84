"""Parts that fail do not stop the others, and leave no figure behind."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

import suite
from _parts import PARTS

GOOD = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from _interleave import Report
report = Report("scaling", base="apart")
report.add({{"ranks": 2, "parameters": 100}}, {{"apart": [1.0], "Hora": [2.0], "DDP": [4.0]}})
raise SystemExit(report.finish(Path(sys.argv[-1])))
"""
BAD = "import sys; sys.exit('too many grapes')"
SLOW = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"
PLACE = "# Performance\n\n<!-- figures: begin -->\n<!-- figures: end -->\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with three parts: one that is slow, one that fails, and one that works."""
    pytest.importorskip("matplotlib")
    scripts = {
        "start_up": SLOW,
        "guard_cost": BAD,
        "scaling": GOOD.format(folder=str(Path(suite.__file__).parent)),
    }
    for folder in ("benchmarks", "docs", "runs/bench"):
        (tmp_path / folder).mkdir(parents=True)
    for name, script in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(script)
    (tmp_path / "docs" / "performance.md").write_text(PLACE)
    (tmp_path / "runs" / "bench" / "start_up.json").write_text("an old file")
    chosen = [part for name in scripts for part in PARTS if part.name == name]
    chosen = [dataclasses.replace(part, limit=2.0 if part.name == "start_up" else 60.0) for part in chosen]
    monkeypatch.setattr(suite, "PARTS", chosen)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "PAGE", tmp_path / "docs" / "performance.md")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_part_survives_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite.py"])
    assert suite.main() == 1
    results = root / "runs" / "bench"
    assert sorted(path.name for path in results.iterdir()) == ["parts.json", "scaling.json"]
    states = json.loads((results / "parts.json").read_text())["parts"]
    reasons = {name: state["reason"] for name, state in states.items()}
    assert reasons == {
        "start_up": "stopped after 2 s",
        "guard_cost": "exit code 1: too many grapes",
        "scaling": None,
    }
    page = (root / "docs" / "performance.md").read_text()
    assert "- Not measured: What the guard costs: exit code 1: too many grapes." in page
    assert "- Not measured: Start-up and its memory: stopped after 2 s." in page
    assert "| 2 ranks, 100 parameters | Hora | DDP | 2.00 s : 4.00 s | 2.00 | 2.00 | 2.00 |" in page
    assert str(root) not in page
    assert "scaling FAILED" not in capfd.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int((root / "pid").read_text()), 0)


def test_the_quick_way_leaves_the_page_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["suite.py", "--quick", "--only", "scaling"])
    assert suite.main() == 0
    assert (root / "docs" / "performance.md").read_text() == PLACE
    assert "Quick figures" in (root / "runs" / "bench-quick" / "performance.md").read_text()


def test_the_quick_way_ends_within_ten_minutes() -> None:
    assert suite.QUICK_SECONDS + suite.PATIENCE < 600
    assert all(part.quick_limit <= part.limit for part in PARTS)


def test_a_part_without_time_left_is_not_started(tmp_path: Path) -> None:
    ended = suite.run(PARTS[0], quick=True, results=tmp_path, until=0.0)
    assert ended == {"seconds": 0.0, "reason": "no time was left for it"}


def test_each_part_has_a_benchmark() -> None:
    for part in PARTS:
        assert (Path(suite.__file__).parent / f"{part.benchmark}.py").is_file()
        words = part.command(quick=True, results=Path("r"))
        assert words[-2:] == ["--json", f"r/{part.name}.json"]
    assert len({part.name for part in PARTS}) == len(PARTS)

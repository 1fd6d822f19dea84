"""The worlds of an elastic job in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report import samples

from hora.cli import main
from hora.report._page import render
from hora.report._read import read
from hora.report._worlds import read_worlds, sentence


def test_a_table_says_who_when_why_and_what_was_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = samples.elastic(tmp_path / "run")
    page = render(read(run))
    text = "5 worlds; workers were lost 2 times, and 8 steps were made again."
    assert text in page
    assert "worlds.jsonl: 1 malformed line left out." in page
    assert main(["report", str(run.path), "--text"]) == 0
    shown = capsys.readouterr().out
    assert not run.report.exists()
    assert shown.startswith("# resnet, quick\n\n**Target reached")
    assert text in shown
    table = [[cell.strip() for cell in line[2:-2].split("|")] for line in shown.splitlines() if "|" in line]
    killed = "failed: SIGKILL (killed from outside), exit code 137"
    assert table[2:] == [
        ["0", "3.0 s", "18 s", "3", "0, 1, 2", "0", f"worker 1 {killed}", "7"],
        ["1", "22 s", "8.5 s", "2", "0, 2", "40", "worker 3 taken in", ""],
        ["2", "30 s", "25 s", "3", "0, 2, +3", "61", "worker 4 taken in", ""],
        ["3", "55 s", "5.0 s", "4", "0, 2, 3, +4", "90", f"worker 2 {killed}", "1"],
        ["4", "60 s", "11 s", "3", "0, 3, 4", "99", table[6][6], ""],
    ]
    assert table[6][6].startswith("Target reached")


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", '{"workers": 3}', '{"workers": ["x", null, -1], "time": "x", "reason": 5}', "[" * 10**5],
)
def test_odd_lines_are_told_not_raised(tmp_path: Path, line: str) -> None:
    path = tmp_path / "worlds.jsonl"
    good = json.dumps({"number": 0, "time": 5.0, "workers": list(range(40))})
    path.write_text(f"{line}\n{good}\n{line}\n")
    rows, _ = read_worlds(path, started=float("nan"), ended=float("nan"), how="Finished")
    assert any(row.workers == "0, 1, 2, 3, 4, 5, 6, 7, …, 32, 33, 34, 35, 36, 37, 38, 39" for row in rows)
    assert sentence(rows)


def test_a_job_that_is_not_elastic_has_none(tmp_path: Path) -> None:
    assert "Worlds" not in render(read(samples.finished(tmp_path / "run")))

"""Which processes of a rank are stopped?"""

from __future__ import annotations

from pathlib import Path

from hora.launch._children import stopped


def test_stopped_descendants_are_found_whatever_their_names(tmp_path: Path) -> None:
    table = {
        10: "10 (python) S 1 10",
        11: "11 (pt_data_worker) T 10 10",
        12: "12 (pt_data_worker) S 10 10",
        13: "13 (fork server) S 10 10",
        14: "14 (a) T (b) t 13 10",
        15: "15 (sh) T 9 9",  # of another rank
        16: "16 (loop) T 17 9",  # a table that was read while it changed
        17: "17 (loop) T 16 9",
    }
    for pid, text in table.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(text + " 0 0\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "18").mkdir()  # ended meanwhile
    words = {str(child) for child in stopped(10, tmp_path)}
    assert words == {"loader worker (pid 11)", "process a) T (b (pid 14)"}
    assert stopped(10, tmp_path / "nothing") == []

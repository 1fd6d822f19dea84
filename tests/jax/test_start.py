"""How a job begins, and what ranks are told that have no guard."""

from __future__ import annotations

from pathlib import Path

from tests.jax.jobs import run


def test_init_after_jax_was_used_names_the_line_to_write(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "starting.py", "used")
    assert ended.code == 0, ended.printed
    assert ended.printed.count("refused") == 2


def test_the_scripts_connection_is_kept_and_ranks_that_differ_are_told_without_a_guard(
    tmp_path: Path,
) -> None:
    ended = run(tmp_path, 2, "starting.py", "own", options=("--guard", "off"))
    assert ended.code == 0, ended.printed
    assert ended.printed.count("done") == 2

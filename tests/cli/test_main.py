"""The command itself: verbs, speed, errors in one line."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hora import cli
from hora.core.pages import pages

SOURCE = str(Path(__file__).parents[2] / "src")


def hora(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hora", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, **environ},
        timeout=60,
        check=False,
    )


@pytest.mark.alone
def test_help_answers_in_under_0_3_seconds_and_lists_every_verb() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        shown = hora("--help")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
    assert all(f"    {verb}" in shown.stdout for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_has_a_module_of_its_own_and_light_help(verb: str) -> None:
    module = importlib.import_module(f"hora.cli.{verb}")
    assert callable(module.configure)
    assert callable(module.main)
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from hora.cli import main\n"
            f"try: main([{verb!r}, '--help'])\n"
            "except SystemExit: pass\n"
            "heavy = {'torch', 'numpy', 'rich', 'psutil', 'jinja2'}\n"
            "print(sorted(heavy & set(sys.modules)), file=sys.stderr)",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        check=True,
    )
    assert loaded.stderr.strip() == "[]"


def test_a_hora_error_is_one_line_and_exit_code_2() -> None:
    shown = hora("settings", HORA_TIMEOUT="soon")
    assert shown.returncode == 2
    assert shown.stderr.startswith("hora: HORA_TIMEOUT='soon' is not a number.")
    assert shown.stderr.count("\n") == 1


def test_settings_shows_value_and_source() -> None:
    shown = hora("settings", HORA_TIMEOUT="60", COLUMNS="200").stdout
    line = next(line for line in shown.splitlines() if line.startswith("HORA_TIMEOUT"))
    assert line.split()[:4] == ["HORA_TIMEOUT", "60.0", "environment", "300.0"]
    assert "HORA_RANK" not in shown
    assert "HORA_RANK" in hora("settings", "--all").stdout


def test_explain_prints_the_page_of_an_error_or_a_verdict() -> None:
    assert hora("explain", "world").stdout.startswith("# WorldError")
    assert hora("explain", "WorldError").stdout.startswith("# WorldError")
    assert hora("explain", "late-rank").stdout.startswith("# A rank keeps the others waiting")
    listed = dict(line.split(maxsplit=1) for line in hora("explain").stdout.splitlines())
    assert set(listed) == set(pages())
    assert listed["late-rank"] == "A rank keeps the others waiting"
    assert listed["already-initialized"].startswith("`init()` was called a second time")
    wrong = hora("explain", "wrold")
    assert wrong.returncode == 2
    assert "Did you mean `hora explain world`?" in wrong.stderr


def test_a_reader_that_goes_away_is_not_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    shown = subprocess.run(
        [sys.executable, "-m", "hora", "settings"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        check=False,
    )
    os.close(write)
    assert shown.stderr == ""

"""The YAML file of `horovodrun --config-file`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hora.cli import horovodrun
from hora.cli._horovod_config import SECTIONS, read
from hora.cli._horovod_flags import parser

WHOLE = """
verbose: true
params:
  fusion-threshold-mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: true
  log_file: log.txt
  gaussian_process_noise: 0.9
timeline:
  filename: timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  mpi_args: --tag-output
  gloo_timeout_seconds: 60
logging:
  level: INFO
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `horovodrun` would run."""
    found: list[Any] = []
    monkeypatch.setattr(horovodrun, "_run", lambda arguments: found.append(arguments) or 0)
    return found


def test_horovods_structure(tmp_path: Path, run: list[Any]) -> None:
    path = written(tmp_path, WHOLE)
    assert horovodrun.main(["-np", "2", "--config-file", str(path), "python", "x.py"]) == 0
    (found,) = run
    assert (found.np, found.verbose, found.command) == (2, True, ["python", "x.py"])
    assert (found.fusion_threshold_mb, found.cycle_time_ms, found.cache_capacity) == (32.0, "10", "2048")
    assert (found.hierarchical_allreduce, found.hierarchical_allgather) == (True, False)
    assert (found.autotune, found.autotune_log_file) == (True, "log.txt")
    assert found.autotune_gaussian_process_noise == "0.9"
    assert (found.timeline_filename, found.timeline_mark_cycles) == ("timeline.json", True)
    assert found.no_stall_check is True
    assert (found.stall_check_warning_time_seconds, found.stall_check_shutdown_time_seconds) == (120.0, 240.0)
    assert (found.mpi_threads_disable, found.mpi_args) == (True, "--tag-output")
    assert (found.gloo_timeout_seconds, found.log_level) == (60.0, "INFO")
    assert horovodrun._variables(found) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_TIMELINE": "timeline.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    }


def test_the_command_line_counts_before_the_file(tmp_path: Path, run: list[Any]) -> None:
    path = written(tmp_path, WHOLE)
    words = ["--fusion-threshold-mb", "1", "--no-timeline-mark-cycles", "--stall-check", "--no-autotune"]
    assert horovodrun.main([*words, "--config-file", str(path), "python", "x.py"]) == 0
    (found,) = run
    assert found.fusion_threshold_mb == 1.0
    assert (found.timeline_mark_cycles, found.no_stall_check, found.autotune) == (False, False, False)


def test_unknown_keys_are_explained(
    tmp_path: Path, run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "params: {fusion: 1}\ntimelines: {filename: x}\n")
    assert horovodrun.main(["--config-file", str(path), "python", "x.py"]) == 0
    one, other = capsys.readouterr().err.splitlines()
    assert one.startswith("horovodrun: params.fusion of ")
    assert "the keys of params are fusion_threshold_mb, cycle_time_ms" in one
    assert other.startswith("horovodrun: timelines of ")
    assert "the sections are params, autotune, timeline" in other


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("params: {fusion_threshold_mb: much}", "'much', which is no number"),
        ("num_proc: 1.5", "1.5, which is no whole number"),
        ("timeline: {mark_cycles: 3}", "Write true or false"),
        ("timeline: {filename: true}", "what --timeline-filename takes"),
        ("params: 3", "params of"),
        ("- a", "holds a list"),
        ("a: [", "cannot be read"),
    ],
)
def test_values_that_cannot_be(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert horovodrun.main(["--config-file", str(path), "python", "x.py"]) == 2
    assert told in capsys.readouterr().err


def test_an_empty_file_and_empty_keys_say_nothing(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "timeline: {filename: }\n", "stall_check:\n"):
        assert read(written(tmp_path, text), parser()) == ([], [])


def test_every_key_is_a_flag() -> None:
    flags = parser()._option_string_actions
    assert [flag for keys in SECTIONS.values() for flag in keys.values() if f"--{flag}" not in flags] == []


def test_without_pyyaml_the_line_to_write_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = written(tmp_path, WHOLE)
    assert horovodrun.main(["-np", "2", "--config-file", str(path), "python", "x.py"]) == 2
    assert "pip install 'hora[horovod]'" in capsys.readouterr().err

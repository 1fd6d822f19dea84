"""The YAML file of ``horovodrun --config-file``, as flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hora.core.errors import LaunchError, MissingExtraError

__all__ = ["read"]

SECTIONS = {
    "params": {
        "fusion_threshold_mb": "fusion-threshold-mb",
        "cycle_time_ms": "cycle-time-ms",
        "cache_capacity": "cache-capacity",
        "hierarchical_allreduce": "hierarchical-allreduce",
        "hierarchical_allgather": "hierarchical-allgather",
        "torus_allreduce": "torus-allreduce",
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune-log-file",
        "warmup_samples": "autotune-warmup-samples",
        "steps_per_sample": "autotune-steps-per-sample",
        "bayes_opt_max_samples": "autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "timeline-filename", "mark_cycles": "timeline-mark-cycles"},
    "stall_check": {
        "enabled": "stall-check",
        "warning_time_seconds": "stall-check-warning-time-seconds",
        "shutdown_time_seconds": "stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": "mpi-threads-disable",
        "mpi_args": "mpi-args",
        "tcp": "tcp",
        "binding_args": "binding-args",
        "num_nccl_streams": "num-nccl-streams",
        "thread_affinity": "thread-affinity",
        "gloo_timeout_seconds": "gloo-timeout-seconds",
    },
    "logging": {
        "level": "log-level",
        "hide_timestamp": "log-hide-timestamp",
        "with_timestamp": "log-with-timestamp",
    },
}
"""Horovod's keys by their section, and the flag that each is. Dashes count as underscores."""


def read(path: Path, parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The words of a command line that says what the file says, and a line for each key that is unknown.

    A key outside the sections is the name of a flag: ``verbose: true``.

    Raises:
        MissingExtraError: PyYAML is not installed.
        LaunchError: the file cannot be read, has another form, or a value is of another kind.
    """
    words: list[str] = []
    lines: list[str] = []
    for section, content in _content(path).items():
        keys = SECTIONS.get(_plain(section))
        if keys is None:
            flag = str(section).replace("_", "-")
            if f"--{flag}" in parser._option_string_actions and flag not in ("config-file", "version"):
                words += _words(flag, content, parser, where=f"{section} of {path}")
            else:
                known = ", ".join(SECTIONS)
                lines.append(f"{section} of {path} has no effect: the sections are {known}")
            continue
        if content is None:
            continue
        if not isinstance(content, dict):
            raise LaunchError(
                f"{section} of {path} is {content!r}, and not a section.",
                fix=f"Write `{section}:` and below it, indented, for example `{next(iter(keys))}: ...`.",
            )
        for key, value in content.items():
            found = keys.get(_plain(key))
            if found is None:
                known = ", ".join(keys)
                lines.append(f"{section}.{key} of {path} has no effect: the keys of {section} are {known}")
            else:
                words += _words(found, value, parser, where=f"{section}.{key} of {path}")
    return words, lines


def _content(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(
            "--config-file needs the package PyYAML, which is not installed.",
            fix="Run pip install 'hora[horovod]', or give the flags on the command line.",
        ) from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(
            f"The file {path} cannot be read: {error}.", fix="Check its path and form."
        ) from error
    if not isinstance(content, dict | None):
        raise LaunchError(
            f"The file {path} holds a {type(content).__name__}, not sections.",
            fix="Write for example `params:` and below it, indented, `fusion_threshold_mb: 64`.",
        )
    return content or {}


def _words(flag: str, value: Any, parser: argparse.ArgumentParser, *, where: str) -> list[str]:
    """A value as words of the command line, of the kind that the flag takes."""
    if value is None:
        return []
    action = parser._option_string_actions[f"--{flag}"]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise LaunchError(f"{where} is {value!r}.", fix="Write true or false.")
        opposite = f"--no-{flag}"
        return [f"--{flag}"] if value else [opposite] * (opposite in parser._option_string_actions)
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool | dict | list) for one in values):
        raise LaunchError(f"{where} is {value!r}.", fix=f"Write what --{flag} takes on the command line.")
    for one in values:
        if action.type in (int, float) and not _is_number(one, action.type):
            kind = "whole number" if action.type is int else "number"
            raise LaunchError(f"{where} is {one!r}, which is no {kind}.", fix=f"Write a {kind}.")
    if len(values) == 1:
        return [f"--{flag}={values[0]}"]  # a value may start with a dash
    return [f"--{flag}", *map(str, values)]


def _is_number(value: Any, kind: Any) -> bool:
    try:
        kind(str(value))
    except ValueError:
        return False
    return True


def _plain(key: Any) -> str:
    return str(key).replace("-", "_")

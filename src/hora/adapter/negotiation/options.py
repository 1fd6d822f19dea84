"""The ``HOROVOD_*`` variables that a rank reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Options", "options"]

MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """Variables with a meaning in Hora, in Horovod's units and with its defaults.

    Attributes:
        fusion_bytes: operations that are ready together are joined up to this size; 0: never.
        stall_check: whether operations that not all ranks ask for are reported.
        stall_warning: seconds until they are.
        stall_shutdown: seconds until they fail; 0: never.
        timeline: file of the timeline, ``DYNAMIC`` for none until ``start_timeline``.
        mark_cycles: whether releases are marked in it.
        dynamic_sets: whether process sets may be added after ``init``.
    """

    fusion_bytes: int = 128 * MB
    stall_check: bool = True
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    timeline: str | None = None
    mark_cycles: bool = False
    dynamic_sets: bool = False


def options(environ: Mapping[str, str] | None = None) -> Options:
    """Read them. A value that is no number counts as the default, as with Horovod."""
    environ = os.environ if environ is None else environ
    return Options(
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 128 * MB)),
        stall_check=not _flag(environ, "HOROVOD_STALL_CHECK_DISABLE"),
        stall_warning=_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeline=environ.get("HOROVOD_TIMELINE") or None,
        mark_cycles=_flag(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        dynamic_sets=_flag(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
    )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ[name])
    except (KeyError, ValueError):
        return default


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")

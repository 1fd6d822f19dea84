"""Every ``HORA_*`` variable, in one typed table.

A setting is one field of :class:`Settings`: its name, type, default, unit and meaning. The variable
is ``HORA_`` plus the field's name in capitals. ``hora settings`` prints this table together with the
value in force and where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hora.core.errors import SettingError

__all__ = ["Row", "Settings", "load", "rows"]

PREFIX = "HORA_"
_SERVICE_LINK = re.compile(r"HORA_(.+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_.*)?$")
"""Kubernetes injects such variables into each pod when a Service is named ``hora`` or ``hora-...``."""


def _setting(
    default: Any, *, unit: str, meaning: str, by: Literal["user", "launcher"] = "user", zero: bool = False
) -> Any:
    metadata = {"unit": unit, "meaning": meaning, "by": by, "zero": zero}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in force, each a typed field. Build it with :func:`load`."""

    run_dir: Path | None = _setting(
        None, unit="path", meaning="run directory; none: nothing is written (`hora run` always has one)"
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto", unit="", meaning="where a rank computes; auto: cuda where there is one, else cpu"
    )
    engine: Literal["auto", "shared-memory", "gloo"] = _setting(
        "auto",
        unit="",
        meaning="what moves data between CPUs; auto: shared memory between ranks of one host, else Gloo; "
        "shared-memory: an error where memory cannot be shared",
    )
    timeout: float = _setting(
        300.0, unit="s", meaning="how long a collective or the start waits for the other ranks"
    )
    bucket_mb: float | None = _setting(
        None,
        unit="MB",
        meaning="size of the flat buckets in which gradients are averaged; none: 25, or on shared memory "
        "what the first steps find fastest",
    )
    progress: Literal["auto", "bar", "lines", "off"] = _setting(
        "auto", unit="", meaning="live display; auto: a bar on a terminal, lines elsewhere"
    )
    timeline: bool = _setting(True, unit="", meaning="record events for timeline.json in the run directory")
    timeline_events: int = _setting(
        100_000, unit="events", meaning="events kept per rank; later ones are counted, not kept"
    )
    guard: Literal["on", "strict", "off"] = _setting(
        "on",
        unit="",
        meaning="watch the job; on: each new kind of collective is compared between ranks before it starts, "
        "strict: every collective, off: nothing is watched",
    )
    stall_after: float = _setting(
        30.0, unit="s", meaning="how long ranks wait in a collective until the missing rank is named"
    )
    stall_abort: float | None = _setting(
        None, unit="s", meaning="how long they wait until the job is stopped; none: as long as `HORA_TIMEOUT`"
    )
    stall_warning: float = _setting(
        30.0,
        unit="s",
        meaning="without `hora run` (torchrun, mpirun, srun): how long ranks wait in a collective on shared "
        "memory until the log names those that have not come; 0: never",
        zero=True,
    )
    checkpoints: Path | None = _setting(
        None,
        unit="path",
        meaning="directory of checkpoints, kept over runs; none: the run directory's `checkpoints`",
    )
    resume: Path | None = _setting(
        None,
        unit="path",
        meaning="a run directory, or a directory of checkpoints, to go on from where there is no checkpoint "
        "of its own yet; it is only read",
    )
    stop_grace: float = _setting(
        30.0,
        unit="s",
        meaning="how long a job that is asked to stop may take to reach a step edge and save",
    )
    remote_shell: str = _setting(
        "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ControlPath=none {host}",
        unit="",
        meaning="the command that starts something on another host, `{host}`; the words of that follow it",
    )
    host_silence: float = _setting(
        5.0,
        unit="s",
        meaning="a host of which nothing is heard for so long is lost, and its workers end",
    )
    network: str | None = _setting(
        None,
        unit="",
        meaning="what workers on several hosts talk over: a network (10.0.0.0/24) or the name of an "
        "interface; none: the first network that the hosts share",
    )
    rank: int | None = _setting(None, unit="", meaning="this worker's rank", by="launcher")
    size: int | None = _setting(None, unit="workers", meaning="workers in the job", by="launcher")
    local_rank: int | None = _setting(None, unit="", meaning="rank inside the host", by="launcher")
    local_size: int | None = _setting(None, unit="workers", meaning="workers on this host", by="launcher")
    host_index: int | None = _setting(None, unit="", meaning="which host of the job this is", by="launcher")
    host_count: int | None = _setting(None, unit="hosts", meaning="hosts in the job", by="launcher")
    store: str | None = _setting(
        None, unit="url", meaning="where ranks meet: tcp://HOST:PORT or file:///PATH", by="launcher"
    )
    store_fd: int | None = _setting(
        None, unit="fd", meaning="rank 0's listening socket for the store", by="launcher"
    )
    status_fd: int | None = _setting(
        None, unit="fd", meaning="pipe to the supervisor for progress records", by="launcher"
    )
    guard_fd: int | None = _setting(
        None, unit="fd", meaning="this rank's socket to the guard in the supervisor", by="launcher"
    )
    guard_board: int | None = _setting(
        None, unit="fd", meaning="memory in which ranks note what they do, for the guard", by="launcher"
    )
    notices: str | None = _setting(
        None, unit="fd:inode", meaning="pipe on which ranks tell what they saved", by="launcher"
    )
    attempt: int | None = _setting(
        None,
        unit="",
        meaning="how often `hora run --restarts` has started the ranks; first: 1",
        by="launcher",
    )
    elastic_fd: int | None = _setting(
        None, unit="fd", meaning="socket to the supervisor of an elastic job", by="launcher"
    )
    worker: int | None = _setting(
        None, unit="", meaning="lasting number of this worker in an elastic job", by="launcher"
    )
    job: str | None = _setting(None, unit="id", meaning="marks every process of one job", by="launcher")
    horovod: bool = _setting(
        False, unit="", meaning="whether `import horovod` gives Hora (`hora run --horovod`)", by="launcher"
    )
    preload: str | None = _setting(
        None, unit="module", meaning="module that each rank imports before the script", by="launcher"
    )
    verify: Path | None = _setting(
        None, unit="path", meaning="what `hora verify` wants recorded in this run", by="launcher"
    )
    chaos: Path | None = _setting(
        None, unit="path", meaning="where the ranks of `hora chaos` write down their steps", by="launcher"
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the settings table."""

    variable: str
    value: str
    default: str
    unit: str
    meaning: str
    source: Literal["environment", "default"]
    by: Literal["user", "launcher"]


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the environment.

    Raises:
        SettingError: a value that its type cannot hold, or a ``HORA_*`` variable that does not exist
            (a misspelt setting would otherwise be ignored in silence).
    """
    environ = os.environ if environ is None else environ
    hints = typing.get_type_hints(Settings)
    known = {variable(name): name for name in hints}
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX) or _SERVICE_LINK.match(key):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            hint = f"Did you mean {near[0]}?" if near else "Unset it, or see `hora settings` for the list."
            raise SettingError(f"{key}={text!r} is not a setting of Hora.", fix=hint)
        name = known[key]
        zero = Settings.__dataclass_fields__[name].metadata["zero"]
        values[name] = parse(key, text, hints[name], zero=zero)
    return Settings(**values)


def variable(name: str) -> str:
    """The environment variable of a field: ``run_dir`` -> ``HORA_RUN_DIR``."""
    return PREFIX + name.upper()


def rows(environ: Mapping[str, str] | None = None) -> list[Row]:
    """The table that ``hora settings`` prints, one row per setting."""
    environ = os.environ if environ is None else environ
    settings = load(environ)
    table = []
    for field in dataclasses.fields(Settings):
        key = variable(field.name)
        table.append(
            Row(
                variable=key,
                value=_show(getattr(settings, field.name)),
                default=_show(field.default),
                unit=field.metadata["unit"],
                meaning=field.metadata["meaning"],
                source="environment" if key in environ else "default",
                by=field.metadata["by"],
            )
        )
    return table


def parse(key: str, text: str, kind: Any, *, zero: bool = False) -> Any:
    """Turn ``text`` into ``kind`` (int, float, bool, Path, str, a Literal, or one of them | None).

    A float must be above 0, or may be 0 where that switches something off.
    """
    options = get_args(kind)
    if get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(option for option in options if option is not type(None))
        options = get_args(kind)
    if get_origin(kind) is Literal:
        if text in options:
            return text
        raise SettingError(
            f"{key}={text!r} is not one of {', '.join(options)}.", fix=f"Set {key}={options[0]}."
        )
    fix = f"Write for example {key}={_EXAMPLE[kind]}."
    try:
        value = _CONVERT[kind](text)
    except (ValueError, KeyError):
        raise SettingError(f"{key}={text!r} is not {_KIND[kind]}.", fix=fix) from None
    if kind is float and (value < 0 if zero else value <= 0):
        least = "at least 0" if zero else "above 0"
        raise SettingError(f"{key}={text!r} is too small: it must be {least}.", fix=fix)
    if kind is int and value < 0:
        raise SettingError(f"{key}={text!r} is too small: it must be at least 0.", fix=fix)
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _boolean(text: str) -> bool:
    return {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }[text.lower()]


_CONVERT: dict[Any, Any] = {int: int, float: _number, bool: _boolean, Path: Path, str: str}
_KIND = {int: "a whole number", float: "a number", bool: "on or off", Path: "a path", str: "a text"}
_EXAMPLE = {int: "4", float: "30", bool: "on", Path: "runs/first", str: "text"}


def _show(value: object) -> str:
    return "-" if value is None else str(value)

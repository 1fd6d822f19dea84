"""Where the user's script is: the frames of a stack that are neither Hora's nor a framework's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from hora.guard.source import Block, blocks, rank_condition

__all__ = [
    "Origin",
    "Site",
    "at",
    "called_by_user",
    "line",
    "pass_over",
    "translate",
    "user_frame",
    "user_frames",
    "user_site",
]

FRAMES = 12
"""User frames looked at for a condition on the rank."""

Site = tuple[str, int, int]
"""A place in the script: its file, the first line of the function, and the instruction. A line's number would
have to be looked for, and the hash of a code object is that of all its constants."""

Origin = Callable[[FrameType], tuple[str, int] | None]
"""File and line of what a frame's code was made of; None: nobody knows."""

_passed_over = tuple(
    str(path) + os.sep for path in (Path(__file__).resolve().parents[1], Path(os.__file__).resolve().parent)
)
_user_files: dict[str, bool] = {}
_origins: dict[str, Origin] = {}


def pass_over(*prefixes: str) -> None:
    """Files whose paths begin so are no code of the user's: a framework that is not in site-packages, or
    what it writes for itself. Hora's own, the standard library's and those of site-packages are known.
    """
    global _passed_over
    _passed_over = (*_passed_over, *prefixes)
    _user_files.clear()


def translate(prefix: str, origin: Origin) -> None:
    """Files whose paths begin so are made of the user's by a framework; messages name what of."""
    _origins[prefix] = origin
    _user_files.clear()


def user_frames(limit: int = FRAMES) -> list[tuple[str, int]]:
    """File and line of the user's frames, innermost first."""
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < limit:
        if _is_user(frame.f_code):
            place = _place(frame)
            frames += [] if place is None else [place]
        frame = frame.f_back
    return frames


def at() -> tuple[str | None, str | None, tuple[Block, ...]]:
    """The user's line, the condition on the rank under which it stands, and the blocks that it is in."""
    frames = user_frames()
    if not frames:
        return None, None, ()
    return f"{frames[0][0]}:{frames[0][1]}", rank_condition(frames), blocks(*frames[0])


def user_site(depth: int) -> Site | None:
    """The user's innermost place among the frames from this depth on, cheaper than its line."""
    frame = user_frame(depth + 1)
    return None if frame is None else (frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti)


def user_frame(depth: int) -> FrameType | None:
    """The user's innermost frame among those from this depth on."""
    frame: FrameType | None = sys._getframe(depth)
    known = _user_files
    while frame is not None:
        file = frame.f_code.co_filename
        if known[file] if file in known else _is_user(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def line() -> str:
    """``file:line`` of the user's innermost frame, without the folder; empty where there is none."""
    frame = user_frame(2)
    place = None if frame is None else _place(frame)
    return "" if place is None else f"{Path(place[0]).name}:{place[1]}"


def called_by_user() -> bool:
    """Whether the function that asks was called by the user's code itself, and by no library."""
    frame = sys._getframe(2)
    return user_frame(2) is not None and _is_user(frame.f_code)


def _place(frame: FrameType) -> tuple[str, int] | None:
    file = frame.f_code.co_filename
    for prefix, origin in _origins.items():
        if file.startswith(prefix):
            place = origin(frame)
            return place if place is not None and _is_users(place[0]) else None
    return file, frame.f_lineno


def _is_user(code: CodeType) -> bool:
    file = code.co_filename
    known = _user_files.get(file)
    if known is None:
        known = _user_files[file] = _is_users(file)
    return known


def _is_users(file: str) -> bool:
    return not (file.startswith(("<frozen", *_passed_over)) or "site-packages" in file)

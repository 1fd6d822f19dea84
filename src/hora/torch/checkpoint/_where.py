"""Which directory checkpoints are written to, and which they may be read from."""

from __future__ import annotations

from pathlib import Path

from hora.core.errors import CheckpointError
from hora.torch._context import Context

__all__ = ["directory_of", "resume_of"]


def directory_of(context: Context, given: Path | str | None) -> Path:
    """Where this run writes.

    Raises:
        CheckpointError: nothing says it.
    """
    if given is not None:
        return Path(given).absolute()
    if context.settings.checkpoints is not None:
        return context.settings.checkpoints.absolute()
    if context.run is not None:
        return context.run.path.absolute() / "checkpoints"
    raise CheckpointError(
        "Nothing says where checkpoints go: there is no run directory.",
        fix='Write directory="checkpoints", set HORA_CHECKPOINTS, or start the script with `hora run`.',
    )


def resume_of(context: Context) -> Path | None:
    """Where this run may go on from.

    Raises:
        CheckpointError: the setting names nothing that exists.
    """
    given = context.settings.resume
    if given is None:
        return None
    given = given.absolute()
    if not given.is_dir():
        raise CheckpointError(
            f"HORA_RESUME={given}: there is no such directory.",
            fix="Give the run directory that a run printed at its start, or a directory of checkpoints.",
        )
    inside = given / "checkpoints"
    return inside if inside.is_dir() else given

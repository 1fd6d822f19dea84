"""What ``save`` is asked, and what it returns."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from hora.core.errors import CheckpointError

__all__ = ["Policy", "Save"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which checkpoints stay: see ``hora.core.commits.prune``."""

    keep: int = 3
    keep_every: int | None = None

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            CheckpointError: a number below 1.
        """
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is None and name == "keep_every":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"{name}={value!r} is not a positive whole number.", fix=f"Write for example {name}=3."
                )


class Save:
    """A checkpoint that is being written; made by ``save``.

    Attributes:
        step: its step.
        path: its folder.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._written = threading.Event()
        self._ended = threading.Event()
        self._error: str | None = None

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed; its folder.

        Nothing has to wait: a checkpoint that cannot be written is told as a verdict in any case.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            CheckpointError: it could not be written.
            TimeoutError: it is not written yet.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The checkpoint of step {self.step} is not written after {timeout} s.")
        if self._error is not None:
            raise CheckpointError(
                f"The checkpoint of step {self.step} was not written: {self._error}.",
                fix="Earlier ones are intact. Free some space or choose another directory: hora run "
                "--checkpoints DIR.",
            )
        return self.path

    @property
    def done(self) -> bool:
        """Whether it is committed, or has failed."""
        return self._ended.is_set()

    @property
    def error(self) -> str | None:
        """Why it could not be written; None while that is not known, and when it was."""
        return self._error

    def _ended_with(self, error: str | None) -> None:
        self._error = error
        self._written.set()
        self._ended.set()

"""How a job ended, as its supervisor tells it."""

from __future__ import annotations

from dataclasses import dataclass

from hora.launch.failure import Failure

__all__ = ["Ended"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the job ended.

    Attributes:
        exit_code: 0, or the first failing rank's; 128 + N when signal N ended the job.
        failure: the first failure, if that is why it ended.
        message: one line for a job that was ended otherwise: interrupted, timed out.
        interrupted_by: the signal that ended it.
        saved: step of the newest checkpoint that was committed; None: none was.
    """

    exit_code: int
    failure: Failure | None = None
    message: str | None = None
    interrupted_by: int | None = None
    saved: int | None = None

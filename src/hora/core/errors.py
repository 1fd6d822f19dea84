"""Every exception that Hora raises on purpose.

HoraError
├── UsageError                    the program calls Hora in a way that cannot work
│   ├── NotInitializedError       a collective, or rank(), before init()
│   ├── AlreadyInitializedError   init() a second time
│   ├── CollectiveError           a tensor, dtype, root or operation that a collective cannot take
│   ├── GradientError             gradients that DistributedOptimizer cannot average
│   └── GlobalBatchError          a global batch that does not fit the workers or the data set
├── SettingError                  a HORA_* variable or flag with a wrong value
├── WorldError                    partial or contradictory launch variables (RANK, SLURM_PROCID, ...)
├── WorldChangedError             an elastic job gets another set of workers
├── DataError                     a data path that is missing, truncated or of the wrong shape
├── TrainingError                 a training that cannot go on: its loss is not finite
├── RunDirectoryError             a run directory that is occupied, unwritable or unreadable
│   └── DiskFullError             no space left where the run writes
├── CheckpointError               a checkpoint that cannot be written, or does not fit what it is for
├── LaunchError                   a job that cannot be started
├── VerdictError                  the guard stops the job (`.kind` tells which verdict)
├── VerifyError                   a script of which `hora verify` cannot compare two runs
├── ChaosError                    a job that `hora chaos` cannot disturb in the way that is asked for
├── JobFailedError                a job that started and failed (`.report` tells how)
└── MissingExtraError             an optional package is not installed

Each message carries the wrong value, the reason and the line to write. Each class has a page in
``docs/errors/`` with a wrong and a right example; ``hora explain <slug>`` prints it.
"""

from __future__ import annotations

import re
from typing import ClassVar

__all__ = [
    "AlreadyInitializedError",
    "ChaosError",
    "CheckpointError",
    "CollectiveError",
    "DataError",
    "DiskFullError",
    "GlobalBatchError",
    "GradientError",
    "HoraError",
    "JobFailedError",
    "LaunchError",
    "MissingExtraError",
    "NotInitializedError",
    "RunDirectoryError",
    "SettingError",
    "TrainingError",
    "UsageError",
    "VerdictError",
    "VerifyError",
    "WorldChangedError",
    "WorldError",
]


class HoraError(Exception):
    """Base of all errors raised by Hora.

    Args:
        what: the wrong value and the reason, as one or two sentences.
        fix: what to write or run instead, as a sentence in the imperative.
    """

    slug: ClassVar[str] = "hora"

    def __init_subclass__(cls) -> None:
        if "slug" not in vars(cls):  # else the class shares another's page
            words = re.findall(r"[A-Z][a-z]*", cls.__name__.removesuffix("Error"))
            cls.slug = "-".join(words).lower()

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} {self.fix} (More: hora explain {self.slug})"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders; a keyword-only argument needs this to unpickle.
        return _rebuild, (type(self), self.what, self.fix, self.__dict__)


def _rebuild(cls: type[HoraError], what: str, fix: str, state: dict[str, object]) -> HoraError:
    error = cls.__new__(cls)
    HoraError.__init__(error, what, fix=fix)
    error.__dict__.update(state)
    return error


class UsageError(HoraError, ValueError):
    """The program calls Hora in a way that cannot work."""


class NotInitializedError(UsageError):
    """A function that needs the job was called before ``init()`` or after ``shutdown()``."""


class AlreadyInitializedError(UsageError):
    """``init()`` was called a second time without ``shutdown()`` in between."""


class CollectiveError(UsageError):
    """A tensor, dtype, root rank or reduce operation that a collective cannot take."""


class GradientError(UsageError):
    """Gradients that ``DistributedOptimizer`` cannot average."""


class GlobalBatchError(UsageError):
    """A global batch that does not fit the number of workers or the data set."""


class SettingError(HoraError, ValueError):
    """A ``HORA_*`` variable or a flag holds a value that cannot be used."""


class WorldError(HoraError):
    """The launch variables are partial or contradict each other."""


class WorldChangedError(HoraError):
    """An elastic job gets another set of workers; ``hora.elastic.run`` handles it."""


class DataError(HoraError):
    """A data path is missing, truncated or holds data of the wrong shape."""


class TrainingError(HoraError):
    """A training cannot go on: its loss is not finite."""


class RunDirectoryError(HoraError):
    """A run directory is occupied, unwritable or unreadable."""


class DiskFullError(RunDirectoryError):
    """No space is left where the run writes."""


class CheckpointError(HoraError):
    """A checkpoint cannot be written, or does not fit what it is restored into."""


class LaunchError(HoraError):
    """A job cannot be started."""


class VerdictError(HoraError):
    """The guard stops the job.

    Attributes:
        kind: the verdict's slug, such as ``mismatched-calls``.
        echo: whether the fault is another rank's: this one has only been told of it.
    """

    def __init__(self, what: str, *, fix: str, kind: str) -> None:
        super().__init__(what, fix=fix)
        self.kind = kind
        self.echo = kind == "rank-failed"

    def __str__(self) -> str:
        return f"{self.what} {self.fix} (More: hora explain {self.kind})"


class VerifyError(HoraError):
    """``hora verify`` cannot compare two runs of a script."""


class ChaosError(HoraError):
    """``hora chaos`` cannot disturb a job in the way that is asked for, or has nothing to compare with."""


class JobFailedError(HoraError):
    """A job started and failed.

    Attributes:
        report: the failure report as text, the same that ``hora run`` prints.
        exit_code: the exit code of the first failing rank, 1 to 255.
    """

    def __init__(self, what: str, *, fix: str, report: str, exit_code: int) -> None:
        super().__init__(what, fix=fix)
        self.report = report
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.report}\n{self.fix}"  # the report opens with what happened


class MissingExtraError(HoraError, ImportError):
    """An optional package is not installed."""

"""Start N workers on one host or several, and bring back the truth about how they ended.

:func:`run` calls a function on all ranks and returns their results; :func:`run_job` runs a script or a
module, as ``hora run`` does.
"""

from __future__ import annotations

from hora.launch.execute import JobResult, run_job
from hora.launch.failure import Failure
from hora.launch.function import run
from hora.launch.job import FunctionTarget, Job, ModuleTarget, ScriptTarget, Target

__all__ = [
    "Failure",
    "FunctionTarget",
    "Job",
    "JobResult",
    "ModuleTarget",
    "ScriptTarget",
    "Target",
    "run",
    "run_job",
]

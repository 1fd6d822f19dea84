"""MLPerf's own compliance checker on a run's log."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from hora.core.errors import MissingExtraError
from hora.mlperf.result import log_of

__all__ = ["RULE_SET", "check"]

RULE_SET = "0.7.0"
"""The last one that has ResNet, SSD and Mask R-CNN by the keys that Hora writes."""


def check(run: Path) -> tuple[bool, str]:
    """Whether the log of a run passes the compliance checker, and what that said.

    The rules ask for the numbers of the benchmark: a run that stops at another target does not pass.

    Raises:
        RunDirectoryError: the run has no log.
        MissingExtraError: ``mlperf-logging`` is not installed.
    """
    log = log_of(run)
    if importlib.util.find_spec("mlperf_logging") is None:
        raise MissingExtraError(
            "The compliance checker is in the package mlperf-logging.",
            fix="Run `pip install 'hora[workloads]'`.",
        )
    with tempfile.TemporaryDirectory() as folder:  # the checker leaves a file where it runs
        words = ["--usage", "training", "--ruleset", RULE_SET, "--log_output", str(Path(folder) / "log")]
        done = subprocess.run(
            [sys.executable, "-m", "mlperf_logging.compliance_checker", *words, str(log.absolute())],
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode == 0, (done.stdout + done.stderr).strip()

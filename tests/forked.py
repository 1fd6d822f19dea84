"""Real jobs of ``hora run`` with forked ranks: a framework is imported once, and not by each rank.

The supervisor is the real one, with its logs, verdicts and exit codes; see ``tests/broken/_server.py``. It
is for what happens after the start of a rank. A framework reads some variables when it is imported, so
there is one of these for each environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Forked"]

ROOT = Path(__file__).parents[1]


class Forked:
    """Runs jobs, one at a time; ``close()`` ends the process behind it.

    Args:
        module: the adapter that the scripts use.
        patience: seconds after which a job is killed.
        env: variables for the jobs.
    """

    def __init__(self, module: str, *, patience: float, env: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        own = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HORA_JOB": "0" * 32,
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.broken._server", "1", str(os.getpid()), module, str(patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**kept, **env, **own},
            text=True,
        )

    def run(self, *arguments: str, folder: Path) -> tuple[int, str]:
        """``hora run ARGUMENTS`` in this folder: its exit code and what it wrote. Nothing of it is left."""
        request = {"name": "ended", "arguments": arguments, "folder": str(folder), "real": False}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server has ended"
        result = json.loads(Path(line.strip()).read_text())
        text = "".join(f"{written}\n" for _, written in result["output"])
        assert result["code"] is not None, f"the job does not come to an end\n{text}"
        assert not result["left"], f"it left {result['left']}\n{text}"
        return int(result["code"]), text

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.kill()
        self._server.wait()
        self._server.stdout.close()

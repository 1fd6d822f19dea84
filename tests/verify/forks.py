"""Runs jobs in forks of one process that has imported the framework already: a run costs 0.2 s, not 2 s.

What the launcher would do is done here in small: environment, logs, exit codes. A few tests use the
launcher itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.core.rundir import RunDirectory
from hora.launch import Job, JobResult, ScriptTarget

__all__ = ["Forks"]

ROOT = Path(__file__).parents[2]


class Forks:
    """A runner for ``hora.verify``; ``close()`` ends the process behind it.

    Args:
        module: the adapter that the scripts use.
        env: variables for it.
    """

    def __init__(self, module: str = "hora.torch", env: Mapping[str, str] | None = None) -> None:
        # An environment of their own: importing torch sets variables.
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", **(env or {})}
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"from tests.verify.forks import serve; serve({module!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )

    def __call__(self, job: Job) -> JobResult:
        """Run a job as ``hora.launch.run_job`` does."""
        assert isinstance(job.target, ScriptTarget)
        assert job.run_dir is not None
        run = RunDirectory.create(job.run_dir)
        asked = {
            "script": str(Path(job.target.path).absolute()),
            "arguments": list(job.arguments),
            "workers": job.workers,
            "env": dict(job.env),
            "run_dir": str(run.path),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        began = time.monotonic()
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        bad = [code for code in answer["codes"] if code]
        return JobResult(
            exit_code=bad[0] if bad else 0,
            failure=None,
            run=run,
            seconds=time.monotonic() - began,
            message=answer["last_line"] if bad else None,
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()


def serve(module: str) -> None:
    """Answer one line of JSON for each that is asked, until there are no more."""
    if module == "hora.torch":
        import torch

        torch.set_num_threads(1)
        importlib.import_module("hora.torch.verify._record")
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what torch imports late
    else:
        if module == "hora.tensorflow":
            importlib.import_module("keras")  # TensorFlow imports it late
        importlib.import_module(module)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # so that collections in the ranks do not copy what they share
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = [_fork(asked, rank) for rank in range(asked["workers"])]
        codes = _wait(ranks, limit=80.0)
        last_line = ""
        for rank in range(asked["workers"]):
            written = (Path(asked["run_dir"]) / "logs" / f"rank-{rank}.log").read_text().splitlines()
            if codes[rank] and written and not last_line:
                last_line = written[-1]
        print(json.dumps({"codes": codes, "last_line": last_line}), flush=True)


def _fork(asked: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _become(asked, rank)
        importlib.import_module("hora.adapter.recording.preload")
        runpy.run_path(asked["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - whatever the script raises
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(asked: dict[str, Any], rank: int) -> None:
    log = os.open(f"{asked['run_dir']}/logs/rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = asked["workers"]
    os.environ.update(
        {
            **asked["env"],
            "HORA_RANK": str(rank),
            "HORA_SIZE": str(size),
            "HORA_LOCAL_RANK": str(rank),
            "HORA_LOCAL_SIZE": str(size),
            "HORA_HOST_INDEX": "0",
            "HORA_HOST_COUNT": "1",
            "HORA_STORE": f"file://{asked['run_dir']}/store",
            "HORA_RUN_DIR": asked["run_dir"],
            "HORA_JOB": "verify-test",
            "HORA_DEVICE": "cpu",
            "HORA_TIMEOUT": "40",
        }
    )
    os.chdir(asked["run_dir"])
    sys.argv = [asked["script"], *asked["arguments"]]
    sys.path.insert(0, str(Path(asked["script"]).parent))


def _wait(ranks: list[int], *, limit: float) -> list[int]:
    """Exit codes; once one rank has failed the others get a moment and are then killed."""
    deadline = time.monotonic() + limit
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child]:
                deadline = min(deadline, time.monotonic() + 3)
        elif time.monotonic() > deadline:
            for rank in set(ranks) - set(codes):
                os.kill(rank, 9)
            deadline += 100
        else:
            time.sleep(0.005)
    return [codes[rank] for rank in ranks]

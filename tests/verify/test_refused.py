"""What cannot be compared is an error with the line to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.conftest import SCRIPTS, Ask

from hora.core.errors import VerifyError
from hora.core.rundir import RunDirectory
from hora.launch import Job, JobResult, ScriptTarget
from hora.launch.failure import Failure
from hora.verify import Question, verify


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import hora.torch as hora; hora.init()", r"no step .* with 1 worker.*loss\.backward\(\)"),
        ("import hora.torch as hora; hora.init(); {}[0]", r"fails with 1 worker: KeyError: 0.*hora run -n 1"),
        (
            "import torch; w = torch.nn.Linear(1, 1); o = torch.optim.SGD(w.parameters(), 1.0)\n"
            "while True: w(torch.ones(1, 1)).sum().backward(); o.step()",
            r"without hora\.torch\.init\(\).*`hora\.init\(\)`",
        ),
    ],
)
def test_an_error_says_what_to_write(ask: Ask, tmp_path: Path, body: str, message: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    with pytest.raises(VerifyError, match=f"(?s){message}"):
        ask(script)


def test_a_script_that_fails_with_more_workers_only(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text((SCRIPTS / "uneven.py").read_text() + "\nassert hora.size() == 1\n")
    with pytest.raises(VerifyError, match="fails with 2 workers: AssertionError.*make it run with 2 workers"):
        ask(script, steps=20)


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (
            {"exit_code": 124, "message": "hora: stopped after its timeout of 15 s; 1 worker stopped."},
            r"with 1 worker: stopped after its timeout of 15 s; 1 worker stopped\. Give it more time",
        ),
        (
            {"exit_code": 7, "failure": Failure(rank=3, host="a", exit_code=7, summary="rank 3", report="")},
            r"with 1 worker: rank 3\. Make it run first.*logs/rank-3\.log",
        ),
    ],
)
def test_a_run_that_ends_badly_is_told_with_what_helps(
    tmp_path: Path, ended: dict[str, object], message: str
) -> None:
    def runner(job: Job) -> JobResult:
        assert job.run_dir is not None
        run = RunDirectory.create(job.run_dir)
        return JobResult(**{"failure": None, "run": run, "seconds": 15.0, **ended})  # type: ignore[arg-type]

    question = Question(target=ScriptTarget("train.py"), workers=2, folder=tmp_path / "verify", runner=runner)
    with pytest.raises(VerifyError, match=message):
        verify(question, say=lambda line: None)

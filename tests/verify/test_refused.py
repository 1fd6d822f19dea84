"""What cannot be compared is an error with the line to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.conftest import SCRIPTS, Ask

from hora.core.errors import VerifyError


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

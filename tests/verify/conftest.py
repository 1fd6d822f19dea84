"""Runs ``hora.verify`` on the scripts of this folder, in forks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.verify.forks import Forks

from hora.launch import ScriptTarget
from hora.verify import Question, Report, verify

SCRIPTS = Path(__file__).parent / "scripts"

Ask = Callable[..., Report]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def ask(forks: Forks, tmp_path: Path) -> Ask:
    """Verify ``scripts/<name>.py``, or a path, with so many workers."""

    def ask(script: str | Path, *, workers: int = 2, steps: int = 8, **options: Any) -> Report:
        path = SCRIPTS / f"{script}.py" if isinstance(script, str) else script
        question = Question(
            target=ScriptTarget(str(path)),
            workers=workers,
            steps=steps,
            folder=tmp_path / "verify",
            runner=forks,
            **options,
        )
        return verify(question, say=lambda line: None)

    return ask

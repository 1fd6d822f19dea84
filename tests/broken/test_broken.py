"""Every broken script gets the verdict that its header asks for, and no other. See ``_expect.py``.

With ``REAL_RANKS=1`` every rank is a new interpreter, which takes three times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broken._expect import Jobs, Script, problems, scripts
from tests.room import Room

SCRIPTS = {script.name: script for script in scripts(Path(__file__).parent)}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, room: Room) -> Iterator[Jobs]:
    tests = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in tests if isinstance(item, pytest.Function)]
    with room.entered():  # until the last one: jobs run ahead of the tests
        jobs = Jobs([SCRIPTS[name] for name in chosen], real="REAL_RANKS" in os.environ)
        yield jobs
        jobs.close()


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_verdict(name: str, jobs: Jobs) -> None:
    script: Script = SCRIPTS[name]
    assert problems(script, jobs.result(script)) == []

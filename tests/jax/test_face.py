"""The public names of ``hora.jax`` are exactly those of ``__all__`` and of the reference.

Looked at in a process of its own: JAX warns of every fork after it was imported, and other tests fork.
"""

from __future__ import annotations

import subprocess
import sys

from tests.jax.jobs import ROOT, environment

LOOK = """
import inspect, re, sys, types
from pathlib import Path
import hora.jax as hora

text = Path(sys.argv[1]).read_text()
visible = {
    name for name, value in vars(hora).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
}
assert visible == set(hora.__all__), visible ^ set(hora.__all__)
assert list(hora.__all__) == sorted(hora.__all__)
sections = dict(re.findall(r"^### `([A-Za-z_]+).*?\\n(.*?)(?=^##|\\Z)", text, flags=re.MULTILINE | re.DOTALL))
headings = dict(re.findall(r"^### `([A-Za-z_]+)(.*)`$", text, flags=re.MULTILINE))
assert set(headings) == set(hora.__all__), set(headings) ^ set(hora.__all__)
for name, heading in headings.items():
    assert sections[name].strip(), name
    value = getattr(hora, name)
    if inspect.isfunction(value) or inspect.isclass(value):
        assert inspect.getdoc(value), name
    if inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\\b{parameter}\\b", heading), (name, parameter)
"""


def test_the_face_is_what_the_reference_tells() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(ROOT / "docs" / "reference" / "jax.md")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr

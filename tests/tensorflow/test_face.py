"""The public names of ``hora.tensorflow`` are those of its reference; it needs no other framework."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, types
for name in ("torch", "optax", "flax"):
    sys.modules[name] = None  # an import of it fails
import hora.tensorflow as hora
import hora.tensorflow.horovod as hvd
mine = [name for name in sys.modules if name.startswith(("hora.torch", "hora.jax", "hora.keras"))]
assert not mine, mine
for name, value in sorted(vars(hora).items()):
    if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations":
        print(name)
assert list(hora.__all__) == sorted(hora.__all__)
hora.init()
assert hora.allreduce(hora.size_op(), op=hora.Sum).numpy() == 1
"""


def test_names() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    visible = set(ended.stdout.split())
    listed = re.search(
        r"__all__ = \[(.*?)\]", (ROOT / "src/hora/tensorflow/__init__.py").read_text(), re.DOTALL
    )
    assert listed is not None
    assert visible == set(re.findall(r'"(\w+)"', listed[1]))
    reference = (ROOT / "docs" / "reference" / "tensorflow.md").read_text()
    told = set(re.findall(r"`(\w+)[(`.]", reference))
    assert visible <= told, visible - told

"""The public names of ``hora.torch`` are exactly those of ``__all__`` and of the reference."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import hora.torch as hora

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "torch.md"


def test_all_names_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(hora).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert visible == set(hora.__all__)
    assert list(hora.__all__) == sorted(hora.__all__)


def test_the_reference_has_every_name_and_every_argument() -> None:
    text = REFERENCE.read_text()
    sections = dict(
        re.findall(r"^### `([A-Za-z_]+).*?\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    )
    headings = dict(re.findall(r"^### `([A-Za-z_]+)(.*)`$", text, flags=re.MULTILINE))
    assert set(headings) == set(hora.__all__)
    for name, heading in headings.items():
        assert sections[name].strip(), name
        value = getattr(hora, name)
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters:
                assert re.search(rf"\b{parameter}\b", heading), (name, parameter)


def test_everything_public_says_what_it_is() -> None:
    for name in hora.__all__:
        value = getattr(hora, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


def test_what_few_scripts_use_is_not_imported_by_all() -> None:
    code = (
        "import sys, hora.torch\n"
        "late = ['torch.distributed.checkpoint', 'torch.distributed.fsdp', 'torch.distributed.tensor']\n"
        "print([name for name in late if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"

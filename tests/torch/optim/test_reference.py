from __future__ import annotations

import inspect
import re
from pathlib import Path

from hora.torch import optim

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "optim.md"


def test_the_reference_has_every_name_with_its_arguments() -> None:
    headings = dict(re.findall(r"^### `(\w+)\((.*)\)`$", REFERENCE.read_text(), flags=re.MULTILINE))
    assert set(headings) == set(optim.__all__)
    for name, arguments in headings.items():
        given = inspect.signature(getattr(optim, name)).parameters.values()
        plain = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in given])
        assert str(plain) == f"({arguments})"

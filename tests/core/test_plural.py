from __future__ import annotations

import pytest

from hora.core.plural import plural


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 epochs"), (1, "1 epoch"), (1.0, "1.0 epoch"), (1.5, "1.5 epochs"), (2, "2 epochs")],
)
def test_only_one_is_singular(count: float, text: str) -> None:
    assert f"{count} {plural(count, 'epoch')}" == text


def test_a_plural_of_its_own() -> None:
    assert [plural(count, "class", many="classes") for count in (1, 2)] == ["class", "classes"]

"""The exception tree: drawn, documented, and able to cross process borders."""

import pickle
from pathlib import Path

import pytest

from hora.core import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]
PAGES = Path(__file__).parents[2] / "docs" / "errors"


def test_the_drawing_shows_every_class_below_its_parent() -> None:
    assert errors.__doc__ is not None
    depth_of = {}
    for line in errors.__doc__.splitlines():
        name = line.strip("│├└─ ").split(" ")[0]
        if name.endswith("Error"):
            depth_of[name] = (len(line) - len(line.lstrip("│├└─ "))) // 4
    assert set(depth_of) == set(errors.__all__)
    for cls in CLASSES:
        assert depth_of[cls.__name__] == sum(issubclass(base, errors.HoraError) for base in cls.__mro__) - 1


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not errors.HoraError], ids=lambda c: c.slug)
def test_every_class_has_its_page(cls: type[errors.HoraError]) -> None:
    page = (PAGES / f"{cls.slug}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {cls.__name__}\n")
    assert "\n## Wrong\n" in page
    assert "\n## Right\n" in page


def test_no_page_without_a_class() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {c.slug for c in CLASSES} - {"hora"}


def test_the_message_holds_value_reason_fix_and_page() -> None:
    error = errors.GlobalBatchError(
        "global_batch=250 does not divide among 4 workers.", fix="Use 248 or 252."
    )
    assert str(error) == (
        "global_batch=250 does not divide among 4 workers. Use 248 or 252. (More: hora explain global-batch)"
    )


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.DataError("x is gone.", fix="Bring it back.")))
    assert type(error) is errors.DataError
    assert (error.what, error.fix) == ("x is gone.", "Bring it back.")
    failed = errors.JobFailedError(
        "rank 1 failed.", fix="See its log.", report="rank 1: exit code 3", exit_code=3
    )
    failed = pickle.loads(pickle.dumps(failed))
    assert (failed.report, failed.exit_code) == ("rank 1: exit code 3", 3)
    assert "rank 1: exit code 3" in str(failed)


def test_errors_are_caught_by_the_built_in_kind_a_reader_expects() -> None:
    assert issubclass(errors.GlobalBatchError, ValueError)
    assert issubclass(errors.MissingExtraError, ImportError)

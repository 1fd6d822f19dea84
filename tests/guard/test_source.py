"""Conditions on the rank, found in the source of the caller."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from hora.guard.source import blocks, rank_condition

CALL = "CALL()"


def condition(tmp_path: Path, source: str) -> str | None:
    text = textwrap.dedent(source).lstrip()
    file = tmp_path / "script.py"
    file.write_text(text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if CALL in line)
    found = rank_condition([(str(file), line)])
    return None if found is None else found.replace(str(file), "script.py")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if hora.rank() == 0:\n    CALL()", "`if hora.rank() == 0` (script.py:1)"),
        ("if rank == 0:\n    pass\nelse:\n    CALL()", "`if not (rank == 0)` (script.py:1)"),
        ("if not a.local_rank:\n    for x in y:\n        CALL()", "`if not a.local_rank` (script.py:1)"),
        ("if os.environ['RANK'] == '0':\n    CALL()", "`if os.environ['RANK'] == '0'` (script.py:1)"),
        ("if is_main_process():\n    CALL()", "`if is_main_process()` (script.py:1)"),
        ("x = CALL() if rank0 else None", "`if rank0` (script.py:1)"),
        ("rank == 0 and CALL()", "`rank == 0 and CALL()` (script.py:1)"),
        ("def f():\n    if rank != 0:\n        return\n    CALL()", "`if rank != 0: return` (script.py:2)"),
        ("for i in x:\n    if hora.rank() and i > 3:\n        break\n    CALL()",
         "`if hora.rank() and i > 3: break` (script.py:2)"),
        ("while steps < limits[rank]:\n    CALL()", "`while steps < limits[rank]` (script.py:1)"),
        ("if a:\n    if rank == 1:\n        if b:\n            CALL()", "`if rank == 1` (script.py:2)"),
        ("if hora.size() > 1:\n    CALL()", None),
        ("if step % 10 == 0:\n    CALL()", None),
        ("if rank == 0:\n    print(x)\nCALL()", None),
        ("if rank == 0:\n    pass\nwhile True:\n    CALL()", None),
        ("if rank == 0 and CALL():\n    pass", None),
        ("ranking = 3\nif frank:\n    CALL()", None),
    ],
)  # fmt: skip
def test_finds_the_condition_that_decides(tmp_path: Path, source: str, expected: str | None) -> None:
    assert condition(tmp_path, source) == expected


def test_outer_frames_count_too(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    inner.write_text("def save():\n    sync()\n")
    outer.write_text("if rank == 0:\n    save()\n")
    assert rank_condition([(str(inner), 2), (str(outer), 2)]) == f"`if rank == 0` ({outer}:1)"


def test_what_is_no_python_has_no_condition(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("if rank ==\n")
    assert rank_condition([(str(broken), 1), ("<stdin>", 1), (str(tmp_path / "missing.py"), 3)]) is None


def test_names_the_blocks_around_a_line(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        textwrap.dedent("""
        while more:
            def f(a):
                for x in a:
                    try:
                        go(x)
                    except (OSError, ValueError):
                        if x > 3:
                            CALL()
        """).lstrip()
    )
    assert blocks(str(file), 8) == (
        (2, 8, ""),
        (3, 8, "for x in a"),
        (6, 8, "except (OSError, ValueError)"),
        (7, 8, "if x > 3"),
    )
    assert blocks(str(file), 1) == ((1, 8, ""), (1, 8, "while more"))
    assert blocks(str(tmp_path / "missing.py"), 3) == ()

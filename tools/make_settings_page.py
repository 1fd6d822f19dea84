"""Write docs/reference/settings.md from the settings table. A test holds the page to the table."""

from __future__ import annotations

from pathlib import Path

from hora.core import settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"


def page() -> str:
    """The page's whole text."""
    lines = [
        "# Settings",
        "",
        "Each setting is one environment variable. `hora settings` prints this table with the values in",
        "force and where they came from; a variable that does not exist, or a value that does not fit, is",
        "an error.",
    ]
    for by, heading in (("user", "Yours to set"), ("launcher", "Set by the launcher, for each worker")):
        lines += ["", f"## {heading}", "", "| variable | default | unit | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{row.variable}` | {row.default} | {row.unit} | {row.meaning.replace('|', '/')} |"
            for row in settings.rows({})
            if row.by == by
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

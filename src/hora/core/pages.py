"""The pages that explain errors and verdicts, each with a wrong and a right example."""

from __future__ import annotations

from pathlib import Path

__all__ = ["page", "pages"]

FOLDERS = ("errors", "verdicts")


def pages() -> dict[str, Path]:
    """Every page by its slug: the word behind ``hora explain``."""
    # An installed package carries the pages; a checkout has them in docs/.
    package = Path(__file__).parents[1]
    installed = package / "pages"
    root = installed if installed.is_dir() else package.parents[1] / "docs"
    return {file.stem: file for folder in FOLDERS for file in sorted((root / folder).glob("*.md"))}


def page(slug: str) -> str:
    """The text of a page; empty when there is none of that name."""
    found = pages().get(slug)
    return "" if found is None else found.read_text(encoding="utf-8")

"""``hora explain SLUG``: the page about an error or a verdict, with a wrong and a right example."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable

from hora.core import errors
from hora.core.errors import UsageError
from hora.core.pages import pages
from hora.guard.verdict import KINDS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the name of a page."""
    parser.add_argument(
        "slug", nargs="?", help="the word that the message ended with; none: all, with what each means"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the page, or without a name all names and what each means; 0.

    Raises:
        UsageError: there is no such page.
    """
    found = pages()
    if arguments.slug is None:
        meanings = _meanings(found)
        width = max(map(len, meanings))
        for slug, meaning in meanings.items():
            print(f"{slug:{width}}  {meaning}")
        return 0
    by_class = {getattr(errors, name).__name__: getattr(errors, name).slug for name in errors.__all__}
    page = found.get(by_class.get(arguments.slug, arguments.slug))
    if page is None:
        near = difflib.get_close_matches(arguments.slug, found, n=1)
        hint = f"Did you mean `hora explain {near[0]}`?" if near else "`hora explain` lists them all."
        raise UsageError(f"There is no page named {arguments.slug!r}.", fix=hint)
    print(page.read_text(encoding="utf-8").rstrip())
    return 0


def _meanings(slugs: Iterable[str]) -> dict[str, str]:
    """What each page is about: the verdicts first, in their order, then the errors."""
    classes = [getattr(errors, name) for name in errors.__all__]
    said = {
        one.slug: (one.__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "`") for one in classes
    }
    return {slug: meaning for slug, meaning in {**KINDS, **said}.items() if slug in set(slugs)}

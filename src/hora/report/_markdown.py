"""The pages that explain verdicts, as HTML: headings, paragraphs, lists, code. They use nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

__all__ = ["inline_code", "to_html"]

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_CODE = re.compile(r"`([^`]+)`")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")


def to_html(text: str) -> str:
    """The page without its title. Links become their text: the report has no other pages."""
    return "\n".join(_blocks(text.splitlines()))


def inline_code(text: str) -> str:
    """Plain text whose parts in backquotes become code, as HTML."""
    pieces = _CODE.split(text)
    return "".join(
        f"<code>{escape(piece)}</code>" if index % 2 else escape(piece) for index, piece in enumerate(pieces)
    )


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            stop = next(
                (end for end in range(at + 1, len(lines)) if lines[end].startswith("```")), len(lines)
            )
            yield f'<pre tabindex="0">{escape(chr(10).join(lines[at + 1 : stop]))}</pre>'
            at = stop + 1
        elif line.startswith("#"):
            marks, _, words = line.partition(" ")
            if len(marks) > 1:
                yield f"<h4>{_inline(words)}</h4>"
            at += 1
        elif line.startswith("- "):
            items: list[str] = []
            while at < len(lines) and lines[at].strip() and not lines[at].startswith(("#", "```")):
                if lines[at].startswith("- "):
                    items.append(lines[at][2:])
                else:
                    items[-1] += " " + lines[at].strip()
                at += 1
            yield "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        elif line.strip():
            paragraph: list[str] = []
            while at < len(lines) and lines[at].strip() and not lines[at].startswith(("#", "```", "- ")):
                paragraph.append(lines[at].strip())
                at += 1
            yield f"<p>{_inline(' '.join(paragraph))}</p>"
        else:
            at += 1


def _inline(text: str) -> str:
    return _BOLD.sub(r"<strong>\1</strong>", inline_code(_LINK.sub(r"\1", text)))

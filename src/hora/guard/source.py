"""Does a line of source stand under a condition on the rank?"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Sequence

__all__ = ["rank_condition"]

_RANK = re.compile(
    r"(?:.*_)?(?:rank|ranks)(?:_.*)?|is_(?:main|master|root|first|chief|leader)\w*|(?:main|master)_process|chief|rank0",
    re.IGNORECASE,
)
"""Names that tell one rank from another: rank, local_rank, is_main_process, RANK, ..."""


def rank_condition(frames: Sequence[tuple[str, int]]) -> str | None:
    """The innermost condition on the rank that decided that these frames were reached.

    Args:
        frames: file and line of the user's frames, innermost first.

    Returns:
        Such as ``if hora.rank() == 0 (train.py:12)``; None if there is none.
    """
    for file, line in frames:
        found = _condition(file, line)
        if found is not None:
            return found
    return None


@functools.lru_cache(maxsize=256)
def _condition(file: str, line: int) -> str | None:
    tree = _tree(file)
    if tree is None:
        return None
    found: tuple[int, str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and _mentions_rank(node.test):
            bodies = [node.body] if isinstance(node, ast.IfExp) else node.body
            rest = [node.orelse] if isinstance(node, ast.IfExp) else node.orelse
            for inside, word in ((bodies, "if" if not isinstance(node, ast.While) else "while"), (rest, "not")):
                if any(part.lineno <= line <= (part.end_lineno or part.lineno) for part in inside):
                    found = max(found or (0, ""), (node.lineno, f"{word} {ast.unparse(node.test)}"))
        elif isinstance(node, ast.BoolOp) and any(_mentions_rank(value) for value in node.values[:-1]):
            last = node.values[-1]
            if last.lineno <= line <= (last.end_lineno or last.lineno) and any(
                isinstance(part, ast.Call) for part in ast.walk(last)
            ) and not _is_test(tree, node):
                found = max(found or (0, ""), (node.lineno, ast.unparse(node)))
        body = getattr(node, "body", None)
        if isinstance(body, list):
            found = max(found or (0, ""), _early_exit(body, line)) if _early_exit(body, line) else found
    return None if found is None else f"`{found[1]}` ({file}:{found[0]})"


def _early_exit(body: Sequence[ast.stmt], line: int) -> tuple[int, str] | None:
    """``if rank != 0: return`` before the line, in the same block."""
    reached = next((i for i, part in enumerate(body) if part.lineno <= line <= (part.end_lineno or 0)), None)
    for part in body[: reached or 0]:
        if (
            isinstance(part, ast.If)
            and _mentions_rank(part.test)
            and isinstance(part.body[-1], (ast.Return, ast.Continue, ast.Break))
        ):
            return part.lineno, f"if {ast.unparse(part.test)}: {ast.unparse(part.body[-1])}"
    return None


def _is_test(tree: ast.AST, node: ast.AST) -> bool:
    return any(
        isinstance(other, (ast.If, ast.IfExp, ast.While)) and other.test is node for other in ast.walk(tree)
    )


def _mentions_rank(test: ast.AST) -> bool:
    for node in ast.walk(test):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name is None and isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value  # os.environ["RANK"]
        if name is not None and _RANK.fullmatch(name):
            return True
    return False


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # not Python text, such as a notebook's cell
        return None

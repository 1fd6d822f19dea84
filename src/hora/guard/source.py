"""Where a line of source stands: under a condition on the rank, and in which blocks that may be left out."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence

__all__ = ["Block", "blocks", "rank_condition"]

Block = tuple[int, int, str]
"""First and last line of a loop, an ``if`` or a handler, and its head; of a function or file: ''."""

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
    found = [place for node in ast.walk(tree) for place in _conditions(node, line, tree)]
    if not found:
        return None
    at, text = max(found)
    return f"`{text}` ({file}:{at})"


@functools.lru_cache(maxsize=256)
def blocks(file: str, line: int) -> tuple[Block, ...]:
    """The blocks around a line, outermost first: the function (or file) that it is in, then what it may
    come to or not, or more than once. Empty where there is no source.
    """
    tree = _tree(file)
    if tree is None or not tree.body:
        return ()
    found: list[Block] = [(1, max(line, tree.body[-1].end_lineno or 1), "")]
    for node in ast.walk(tree):  # from the outside in
        if not _holds(node, line):
            continue
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found = [(first, last, "")]
        elif isinstance(node, (ast.If, ast.While)):
            found.append((first, last, f"{type(node).__name__.lower()} {ast.unparse(node.test)}"))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            found.append((first, last, f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"))
        elif isinstance(node, ast.ExceptHandler):
            found.append((first, last, f"except {ast.unparse(node.type)}" if node.type else "except"))
    return tuple(found)


def _conditions(node: ast.AST, line: int, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each condition on the rank by which this node decides whether ``line`` is reached."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and _mentions_rank(node.test):
        test = ast.unparse(node.test)
        if _holds(node.body, line):
            yield node.lineno, f"while {test}" if isinstance(node, ast.While) else f"if {test}"
        if _holds(node.orelse, line):
            yield node.lineno, f"if not ({test})"
    elif isinstance(node, ast.BoolOp) and any(map(_mentions_rank, node.values[:-1])):
        last = node.values[-1]
        calls = any(isinstance(part, ast.Call) for part in ast.walk(last))
        if calls and _holds(last, line) and not _is_test(tree, node):
            yield node.lineno, ast.unparse(node)
    body = getattr(node, "body", None)
    if isinstance(body, list):
        reached = next((number for number, part in enumerate(body) if _holds(part, line)), 0)
        for part in body[:reached]:
            if (
                isinstance(part, ast.If)
                and _mentions_rank(part.test)
                and isinstance(part.body[-1], (ast.Return, ast.Continue, ast.Break))
            ):
                yield part.lineno, f"if {ast.unparse(part.test)}: {ast.unparse(part.body[-1])}"


def _holds(part: ast.AST | Sequence[ast.AST], line: int) -> bool:
    if isinstance(part, ast.AST):
        first: int = getattr(part, "lineno", 0)
        last: int = getattr(part, "end_lineno", 0)
        return first <= line <= last
    return any(_holds(inner, line) for inner in part)


def _is_test(tree: ast.AST, node: ast.AST) -> bool:
    return any(
        isinstance(other, (ast.If, ast.IfExp, ast.While)) and other.test is node for other in ast.walk(tree)
    )


def _mentions_rank(test: ast.AST) -> bool:
    for node in ast.walk(test):
        name = (
            node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        )
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

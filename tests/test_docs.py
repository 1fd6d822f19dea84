"""What the documentation names exists: files, modules, verbs, flags."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tests.ranks  # noqa: F401 - pages import torch, which sets variables when it is first imported

from hora import cli

ROOT = Path(__file__).parents[1]
WITH_SOURCE = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("benchmarks/", "docs/", "examples/", "src/", "tests/", "tools/")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
IMPORT = re.compile(r"^(?:from (?:tests|hora)[\w.]* import .+|import .*\bhora\b.*)$", re.MULTILINE)
# At the start of a line or of a quotation, or behind the words of another command: mpirun -n 2 hora run.
COMMAND = re.compile(r"(?:^|[`$=&] ?|\w )hora ([a-z][\w-]*)(.*)")
ANOTHER_PROGRAM = re.compile(r"\S+\.py\b|\s-m\s")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of the page's blocks."""
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Verb and flags of each ``hora`` command line that is shown, without the words of the user's program."""
    lines = [
        line.partition(" # ")[0]
        for language, text in code(page)
        if language != "python"
        for line in text.splitlines()
    ]
    lines += ["`" + quoted for quoted in QUOTED.findall(prose(page))]
    parts = [part for line in lines for part in line.split(" -- ")]  # hora chaos ... -- hora run ...
    for line in parts:
        for match in COMMAND.finditer(line):
            ours = ANOTHER_PROGRAM.split(match[2])[0] if match[1] in ("run", "verify") else match[2]
            yield match[1], [word.partition("=")[0] for word in ours.split() if re.match(r"--?[a-z]", word)]


def parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    importlib.import_module(f"hora.cli.{verb}").configure(made)
    return made


def flags(of: argparse.ArgumentParser) -> set[str]:
    """Every flag of a parser and of the parsers below it."""
    found: set[str] = set()
    for action in of._actions:
        found |= set(action.option_strings)
        below: Any = action.choices if isinstance(action, argparse._SubParsersAction) else {}
        for sub in below.values():
            found |= flags(sub)
    return found


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    quoted = [word for text in QUOTED.findall(prose(page)) for word in text.split()]
    named = {word for word in quoted if word.startswith(FOLDERS) and not re.search(r"[<>*]|\.\.\.", word)}
    links = {link for link in LINK.findall(prose(page)) if "://" not in link}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def imports(page: Path) -> list[str]:
    return [line for language, text in code(page) if language == "python" for line in IMPORT.findall(text)]


def apart(line: str) -> bool:
    """TensorFlow leaves threads and variables in the process that imports it."""
    return re.search(r"\b(tensorflow|keras)\b", line) is not None


IMPORTING = """
import json, sys, traceback

failed = {}
for line in json.load(sys.stdin):
    try:
        exec(line, {})
    except BaseException:
        failed[line] = traceback.format_exc()
json.dump(failed, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def failed_apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The lines of all pages that fail in another process, with their tracebacks."""
    lines = sorted({line for page in PAGES for line in imports(page) if apart(line)})
    assert lines
    answer = tmp_path_factory.mktemp("imports") / "failed.json"
    command = [sys.executable, "-c", IMPORTING, str(answer)]
    subprocess.run(command, input=json.dumps(lines), text=True, check=True, env=WITH_SOURCE)
    found: dict[str, str] = json.loads(answer.read_text())
    return found


@each_page
def test_modules_and_names_that_are_imported_exist(page: Path, request: pytest.FixtureRequest) -> None:
    lines = imports(page)
    for line in lines:
        if not apart(line):
            exec(line, {})  # the test fails with the documentation's own line
    if any(map(apart, lines)):
        failed = request.getfixturevalue("failed_apart")
        assert [failed[line] for line in lines if line in failed] == []


@each_page
def test_commands_that_are_shown_are_known(page: Path) -> None:
    for verb, given in commands(page):
        assert verb in cli.VERBS, f"hora {verb}"
        unknown = set(given) - flags(parser(verb)) - {"--help", "-h"}
        assert not unknown, f"hora {verb} has no {', '.join(sorted(unknown))}"


def test_commands_are_found_where_they_are_shown() -> None:
    """The tests above would pass as well if they found nothing."""
    found = {verb for page in PAGES for verb, _ in commands(page)}
    assert {"run", "train", "report", "settings", "explain"} <= found
    launching = list(commands(ROOT / "docs" / "guide" / "launch.md"))
    assert ("run", ["-n", "--env", "--run-dir", "--quiet"]) in launching
    assert ("run", ["-n"]) in launching  # --lr is the script's
    workload = list(commands(ROOT / "docs" / "guide" / "resnet.md"))
    assert ("train", ["-n", "--optimizer", "--seed"]) in workload

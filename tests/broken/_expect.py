"""What a script's first lines say should come of it, and whether it did.

The header is a block of comments, one ``# key: value`` a line:

=============  =========================================================================================
``ranks``      how many workers run it
``verdict``    the kind of the one verdict that it must produce; ``a | b``: either; none: no verdict
``at-fault``   the verdict's ``ranks``
``call``       part of the verdict's ``call``
``says``       part of the verdict's ``text``
``options``    more flags of ``hora run``
``ends``       ``error``: with an exit code; ``hang``: the same, by ``--stall-abort``; ``ok``: with 0
``after``      text of the output line that comes right before the fault
``within``     seconds from that line, else from the first exception of a rank at fault, else from the end
               of ``init()``, to the error on every rank
=============  =========================================================================================

A line that ends with ``# <- here`` is one that the verdict's ``where`` may name. The ranks' errors about
mismatched calls name all such lines.

    python -m tests.broken._expect [--real] tests/broken/late_*.py

runs scripts by hand and prints their verdicts, and what is wrong with them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Jobs", "Script", "problems", "scripts"]

AT_ONCE = 2
"""Jobs that run at the same time."""

ROOT = Path(__file__).resolve().parents[2]

INFORMATION = frozenset({"plan"})
"""Kinds that say nothing is wrong."""


@dataclass(frozen=True)
class Script:
    """A script and its header."""

    path: Path
    header: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Script:
        """The script of this path."""
        found = re.findall(r"^# ([a-z-]+): (.+)$", path.read_text().partition('"""')[0], re.MULTILINE)
        return cls(path, dict(found))

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def ranks(self) -> int:
        return int(self.header["ranks"])

    @property
    def kinds(self) -> list[str]:
        return [kind.strip() for kind in self.header.get("verdict", "").split("|") if kind.strip()]

    @property
    def lines(self) -> list[int]:
        """The lines at fault."""
        text = self.path.read_text().splitlines()
        return [number for number, line in enumerate(text, 1) if line.endswith("# <- here")]


def scripts(folder: Path) -> list[Script]:
    """The scripts of a folder, by name."""
    paths = sorted(path for path in folder.glob("*.py") if not path.name.startswith(("_", "test_")))
    return [Script.read(path) for path in paths]


class Jobs:
    """Runs scripts by ``hora run``, some at a time, in the order in which they are given.

    Args:
        chosen: the scripts.
        real: start every rank as a new interpreter.
    """

    def __init__(self, chosen: Sequence[Script], *, real: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hora-scripts-")
        self._real = real
        requests = "".join(json.dumps(self._request(script)) + "\n" for script in chosen)
        self._results: dict[str, dict[str, Any]] = {}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.broken._server", str(AT_ONCE), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("HORA_")},
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "OMP_NUM_THREADS": "1",
                "HORA_JOB": "0" * 32,
            },
            text=True,
        )
        assert self._server.stdin is not None
        with self._server.stdin as stdin:
            stdin.write(requests)

    def result(self, script: Script) -> dict[str, Any]:
        """Wait for a job's end: its exit code, its output, what it left, and its run directory."""
        assert self._server.stdout is not None
        while script.name not in self._results:
            line = self._server.stdout.readline()
            assert line, "the server has ended"
            result = json.loads(Path(line.strip()).read_text())
            self._results[result["name"]] = result | {"run": self._run(result["name"]), "real": self._real}
        return self._results[script.name]

    def close(self) -> None:
        """End what still runs."""
        assert self._server.stdout is not None
        self._server.kill()
        self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()

    def _run(self, name: str) -> Path:
        return Path(self._folder.name) / "runs" / name

    def _request(self, script: Script) -> dict[str, Any]:
        options = script.header.get("options", "").split()
        run = str(self._run(script.name))
        flags = ["-n", str(script.ranks), "--run-dir", run, "--timeout", "50", *options]
        return {
            "name": script.name,
            "arguments": [*flags, str(script.path)],
            "folder": self._folder.name,
            "real": self._real,
        }


def problems(script: Script, result: dict[str, Any]) -> list[str]:
    """What is not as the header says; empty when all is."""
    return list(_problems(script, result))


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a run's ``verdicts.jsonl`` that say that something is wrong."""
    file = result["run"] / "verdicts.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [verdict for verdict in found if verdict["kind"] not in INFORMATION]


def _problems(script: Script, result: dict[str, Any]) -> Iterator[str]:
    header, code = script.header, result["code"]
    if result["left"]:
        yield f"it left processes behind: {result['left']}"
    if any("the guard has a fault" in line for _, line in result["output"]):
        yield "the guard has a fault"
    ends = header.get("ends") if script.kinds else "ok"
    if code is None or code == 124:
        yield "it does not come to an end"
    elif ends is not None and (code == 0) != (ends == "ok"):
        yield f"its exit code is {code}"
    found = verdicts(result)
    for verdict in found:
        if verdict["kind"] not in script.kinds:
            yield f"a verdict {verdict['kind']!r}: {verdict['text']}"
    mine = [verdict for verdict in found if verdict["kind"] in script.kinds]
    if script.kinds and not mine:
        yield f"no verdict {' or '.join(script.kinds)}"
    if mine:
        yield from _details(script, mine[0])
        yield from _errors(script, result)


def _details(script: Script, verdict: dict[str, Any]) -> Iterator[str]:
    header = script.header
    if "at-fault" in header:
        ranks = [int(rank) for rank in header["at-fault"].split(",")]
        if verdict["ranks"] != ranks:
            yield f"it blames ranks {verdict['ranks']}, not {ranks}: {verdict['text']}"
    if "call" in header and header["call"] not in (verdict["call"] or ""):
        yield f"its call is {verdict['call']!r}, not {header['call']!r}: {verdict['text']}"
    if header.get("says", "") not in verdict["text"]:
        yield f"it does not say {header['says']!r}: {verdict['text']}"
    if script.lines and verdict["where"] not in [f"{script.path}:{line}" for line in script.lines]:
        yield f"its line is {verdict['where']!r}, not one of {script.lines}: {verdict['text']}"
    for part in ("text", "advice"):
        if not verdict[part].strip():
            yield f"its {part} is empty"


def _errors(script: Script, result: dict[str, Any]) -> Iterator[str]:
    """Every rank that was there has its error, in time, and with what it needs to be understood."""
    if "within" not in script.header:
        return
    records = {_rank(path): json.loads(path.read_text()) for path in result["run"].glob("failures/*.json")}
    events = {_rank(path): path.read_text().splitlines() for path in result["run"].glob("events/*.jsonl")}
    began = {rank: json.loads(lines[0])["start"] for rank, lines in events.items() if lines}
    limit = float(script.header["within"])
    at = _when(script, result, records, began)
    for rank, record in sorted(records.items()):
        if at is None or record["time"] - at > limit:
            late = "unknown" if at is None else f"{record['time'] - at:.2f}"
            yield f"rank {rank} has its error after {late} s, not within {limit:g} s"
    excused = {"subset-call": list(range(script.ranks)), "rank-failed": _at_fault(script)}
    for rank in sorted(began):
        if rank not in records and rank not in excused.get(script.kinds[0], ()):
            yield f"rank {rank} has no error"
    if script.kinds == ["mismatched-calls"]:
        for rank, record in sorted(records.items()):
            for line in script.lines:
                if f"{script.path}:{line}" not in record["message"] + record["traceback"]:
                    yield f"rank {rank}'s error does not name line {line}"


def _when(
    script: Script, result: dict[str, Any], records: dict[int, dict[str, Any]], began: dict[int, float]
) -> float | None:
    """When the fault happened: told by a line of the output, by the rank that raised, or right after init."""
    after = script.header.get("after")
    if after is not None:
        return next((at for at, line in result["output"] if after in line), None)
    if script.kinds == ["rank-failed"]:
        raised = [records[rank]["time"] for rank in _at_fault(script) if rank in records]
        if raised:
            return float(raised[0])
    if result["real"]:  # the first optimizer then imports for seconds, after init()
        return float(verdicts(result)[0]["time"])
    return max(began.values(), default=None)


def _rank(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _at_fault(script: Script) -> list[int]:
    return [int(rank) for rank in script.header.get("at-fault", "").split(",") if rank]


def _main() -> int:
    real = "--real" in sys.argv
    given = [Path(name).resolve() for name in sys.argv[1:] if not name.startswith("-")]
    chosen = [script for script in map(Script.read, given) if script.header]
    jobs = Jobs(chosen, real=real)
    wrong = 0
    try:
        for script in chosen:
            result = jobs.result(script)
            seconds = result["output"][-1][0] - result["began"] if result["output"] else 0.0
            said = problems(script, result)
            wrong += bool(said)
            print(f"{'not ok' if said else 'ok':6} {script.name} ({seconds:.1f} s)")
            for verdict in verdicts(result) if "-v" in sys.argv or said else ():
                print(f"         {verdict['kind']}: {verdict['text']}")
            for problem in said:
                print(f"       - {problem}")
            if "-vv" in sys.argv:
                print("\n".join(f"         | {line}" for _, line in result["output"]))
    finally:
        jobs.close()
    print(f"{len(chosen) - wrong} of {len(chosen)} as their headers say")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_main())

"""All benchmarks one after the other, one table, and the page of figures: what `make bench` runs.

    python benchmarks/suite.py [--quick] [--only collectives scaling] [--results runs/bench]

A part that fails, or runs past its limit, does not stop the others: it is "not measured" in the table and on
the page, and the exit code is 1. What an earlier call had written is taken away first, so that no figure is
older than the rest; with ``--only`` the other parts' stay. All parts are made for some 20 minutes on two idle
cores. With ``--quick`` they end within 10 minutes; then the page is written beside the results, for its
figures are of too few rounds to be shown to others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _interleave import duration
from _parts import PARTS, STATES, Part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"

QUICK_SECONDS = 570.0
"""For all parts of the quick way together; the table and the page take the rest of ten minutes."""

PATIENCE = 10.0
"""Seconds in which a part that is told to end has to."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, within 10 minutes")
    parser.add_argument("--only", choices=[part.name for part in PARTS], nargs="+", metavar="PART")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="default: runs/bench, or runs/bench-quick"
    )
    parser.add_argument("--page", type=Path, help="page to fill; default: docs/performance.md, quick: a copy")
    given = parser.parse_args()
    results = (given.results or ROOT / "runs" / ("bench-quick" if given.quick else "bench")).absolute()
    # Commands that are shown name no folder of this machine.
    results = results.relative_to(ROOT) if results.is_relative_to(ROOT) else results
    os.chdir(ROOT)
    results.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if given.only is None or part.name in given.only]
    states: dict[str, Any] = {}
    if given.only is None:
        for old in results.glob("*.json"):
            old.unlink()
    elif (results / STATES).exists():
        states = json.loads((results / STATES).read_text(encoding="utf-8"))["parts"]
    until = time.monotonic() + (QUICK_SECONDS if given.quick else float("inf"))
    for part in chosen:
        part.file(results).unlink(missing_ok=True)
        states[part.name] = run(part, quick=given.quick, results=results, until=until)
        text = json.dumps({"quick": given.quick, "parts": states}, indent=1)
        (results / STATES).write_text(text + "\n", encoding="utf-8")
    page = given.page and given.page.absolute()
    if page is None:
        page = results / PAGE.name if given.quick else PAGE
    if page.absolute() != PAGE:
        shutil.copy(PAGE, page)
    command = [sys.executable, str(Path(__file__).with_name("summary.py")), str(results), "--page", str(page)]
    done = subprocess.run(command, check=False)
    return int(done.returncode != 0 or any(states[part.name]["reason"] for part in chosen))


def run(part: Part, *, quick: bool, results: Path, until: float) -> dict[str, Any]:
    """Run one part to its end; how long it took, and why it failed, if it did."""
    limit = min(part.quick_limit if quick else part.limit, until - time.monotonic())
    command = part.command(quick=quick, results=results)
    if limit <= 0:
        return {"seconds": 0.0, "reason": "no time was left for it"}
    print(f"\n=== {part.title}: {shlex.join(['python', *command])}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        reason = _reason([sys.executable, *command], limit, errors)
    seconds = time.monotonic() - began
    print(f"=== {part.title}: {duration(seconds)}{f', FAILED: {reason}' if reason else ''}", flush=True)
    return {"seconds": round(seconds, 1), "reason": reason}


def _reason(command: list[str], limit: float, errors: Any) -> str | None:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environ, stderr=errors, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        _end(process)
        errors.seek(0)
        told = errors.read()
        sys.stderr.write(told)
        sys.stderr.flush()
    if code == 0:
        return None
    lines = told.strip().splitlines() or ["see above"]
    return f"exit code {code}: {lines[-1].strip()[:200]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part, and what it may have started, when it still runs: on its limit, or on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)


if __name__ == "__main__":
    raise SystemExit(main())

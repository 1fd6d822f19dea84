"""Kills ranks of a quick training, many times at seeded moments, and counts what survives.

    python benchmarks/survive.py                                       200 kills of an elastic training
    python benchmarks/survive.py --how checkpoints --kills 30 --per-run 2
    python benchmarks/survive.py --how checkpoints --at save --kills 100 --per-run 4

Each run is one ``hora chaos``: it has to end at the target with the result of the undisturbed run, no sample
lost or used twice, and nothing left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("_survivor.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--how", choices=("elastic", "checkpoints"), default="elastic")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-run", type=int, default=8)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--at", help="moments, as for hora chaos")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each has the next")
    parser.add_argument("--folder", type=Path, default=Path(f"runs/survive-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, Any]] = []
    seed = chosen.seed
    while sum(len(one["disturbances"]) for one in told) < chosen.kills:
        told.append(_one(chosen, seed, told))
        seed += 1
    summary = _summary(told)
    for name, value in summary.items():
        print(f"{name:<36} {value}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if summary["runs with the undisturbed result"] == summary["runs"] else 1


def _one(chosen: argparse.Namespace, seed: int, told: list[dict[str, Any]]) -> dict[str, Any]:
    left = chosen.kills - sum(len(one["disturbances"]) for one in told)
    elastic = ["--min-workers", "1"] if chosen.how == "elastic" else ["--restarts", str(20 * chosen.per_run)]
    command = [
        *(sys.executable, "-m", "hora", "chaos"),
        *("--seed", str(seed), "--kill", str(min(chosen.per_run, left)), "--tolerance", "1e-8"),
        *("--run-dir", str(chosen.folder / f"seed-{seed}")),
        *(("--at", chosen.at) if chosen.at else ()),
        *(("--reference", told[0]["reference"]) if told else ()),
        *("--", "hora", "run", "-n", str(chosen.workers), *elastic, str(SCRIPT), chosen.how),
        *("--epochs", str(chosen.epochs), "--pause", str(chosen.pause)),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HORA_DEVICE": "cpu"}
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    path = chosen.folder / f"seed-{seed}" / "chaos.json"
    if not path.exists():
        raise SystemExit(f"{done.stderr}hora chaos itself failed: {' '.join(command)}")
    one: dict[str, Any] = json.loads(path.read_text())
    came = len(one["disturbances"])
    verdict = "same" if one["same"] else "; ".join(one["differences"])
    print(f"seed {seed}: {came} kills in {one['seconds']:.0f} s, {verdict}", flush=True)
    return one


def _summary(told: list[dict[str, Any]]) -> dict[str, Any]:
    kills = [kill for one in told for kill in one["disturbances"]]
    waits = [kill["next_step"] for kill in kills if kill["next_step"] is not None]
    moments = sorted({kill["moment"] for kill in kills})
    return {
        "runs": len(told),
        "kills": len(kills),
        "kills by moment": ", ".join(f"{sum(k['moment'] == m for k in kills)} {m}" for m in moments),
        "runs that ended at the target": sum(one["exit_code"] == 0 for one in told),
        "runs with the undisturbed result": sum(one["same"] for one in told),
        "differences": sum(len(one["differences"]) for one in told),
        "steps repeated": sum(kill["repeated"] for kill in kills),
        "seconds to the next step, median": round(statistics.median(waits), 2) if waits else None,
        "seconds to the next step, largest": round(max(waits), 2) if waits else None,
    }


if __name__ == "__main__":
    sys.exit(main())

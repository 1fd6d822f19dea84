"""How long `hora run -n 2` takes to have two ranks joined in a Gloo group, against torchrun.

Each round starts the same script once with each launcher, in turn. The script imports torch, joins a
Gloo group of two ranks, makes one all-reduce and prints the time at which it was done. Two spans are
measured from the moment the launcher is started: until rank 0 is past the all-reduce, and until the
launcher has returned.

    python benchmarks/launch_vs_torchrun.py --rounds 7
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, time
entered = time.time()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
if dist.get_rank() == 0:
    print("TIMES", entered, time.time(), flush=True)
dist.destroy_process_group()
"""

SPANS = ("rank 0 starts", "all-reduce done", "launcher back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        count = str(arguments.workers)
        commands = {
            "hora run": [sys.executable, "-m", "hora.cli", "run", "-n", count, str(script)],
            "torchrun": [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", count, str(script)),
            ],
        }
        for command in commands.values():  # once unmeasured: page cache and bytecode
            measure(command, folder)
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in commands}
        for index in range(arguments.rounds):
            order = list(commands) if index % 2 == 0 else list(reversed(commands))
            for name in order:
                times[name].append(measure(commands[name], folder))
    for position, span in enumerate(SPANS):
        medians = {}
        for name, rows in times.items():
            values = [row[position] for row in rows]
            medians[name] = statistics.median(values)
            print(f"{span:16} {name:9} {medians[name]:6.3f} s   ({min(values):.3f} to {max(values):.3f})")
        print(f"{span:16} ratio hora / torchrun: {medians['hora run'] / medians['torchrun']:.2f}")


def measure(command: list[str], folder: str) -> tuple[float, float, float]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    entered, reduced = (float(word) for word in done.stdout.partition("TIMES")[2].split()[:2])
    return entered - began, reduced - began, ended - began


if __name__ == "__main__":
    main()

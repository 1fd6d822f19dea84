"""From the command to the first step, and back: `hora run -n 2` against torchrun, with the memory it takes.

    python benchmarks/start_up.py [--ranks 2] [--rounds 7]

A script makes one training step and tells when rank 0 started, when the ranks had met, and when the step was
done; the launchers take turns, round by round. One script is written with PyTorch alone and started by both
launchers; the other is the same with hora.torch. Memory is what each process takes by itself, with its share
of what it has in common with others (PSS), after the step: of the ranks together, and of the launcher with
whatever else it has started.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _interleave import Report, arguments, interleave, long_table

PLAIN = """
import torch, torch.distributed as dist
import torch.distributed.nn.functional  # imported later, as torch.optim does, it would hold the group too
dist.init_process_group("gloo")
rank, gather = dist.get_rank(), dist.all_gather_object
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
met = time.time()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = torch.nn.parallel.DistributedDataParallel(model)
"""

HORA = """
import torch, hora.torch as hora
hora.init()
rank = hora.rank()
assert hora.allreduce(torch.ones(1), op=hora.Sum).item() == hora.size()
met = time.time()
model = torch.nn.Linear(64, 64)
optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hora.broadcast_parameters(model)
def gather(pids, pid):
    pids[:] = hora.allgather_object(pid)
"""

SCRIPT = """
import os, time
started = time.time()
{join}
model(torch.ones(8, 64)).square().mean().backward()
optimizer.step()
stepped = time.time()

pids = [0] * int({ranks})
gather(pids, os.getpid())
if rank == 0:
    import json, psutil
    top = psutil.Process()
    while top.ppid() != int(os.environ["BENCHMARK_PID"]):
        top = top.parent()
    memory = {{one.pid: one.memory_full_info().pss for one in [top, *top.children(recursive=True)]}}
    ranks = sum(memory[pid] for pid in pids)
    found = {{"rank 0 starts": started, "ranks have met": met, "first step done": stepped}}
    found |= {{"memory of the ranks": ranks, "memory of the launcher": sum(memory.values()) - ranks}}
    with open(os.environ["BENCHMARK_FILE"], "w") as file:
        json.dump(found, file)
gather(pids, 0)  # nobody ends while it is looked at
{leave}
"""

LEAVE = "del model\ndist.destroy_process_group()"
"""Else a thread of Gloo, whose group the model holds too, can meet the interpreter's end and abort it."""

LAUNCHERS = ("torchrun", "hora run", "hora run, hora.torch")
TIMES = ("rank 0 starts", "ranks have met", "first step done", "launcher back")
MEMORY = ("memory of the ranks", "memory of the launcher")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launchers", choices=LAUNCHERS, nargs="+", default=LAUNCHERS)
    given = parser.parse_args()
    report = Report("start_up", base="torchrun")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script, join, leave in (("plain.py", PLAIN, LEAVE), ("with_hora.py", HORA, "")):
            text = SCRIPT.format(join=join, leave=leave, ranks=given.ranks)
            (folder / script).write_text(text, encoding="utf-8")
        hora_run = [sys.executable, "-m", "hora.cli", "run", "-n", str(given.ranks)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        commands = {
            "torchrun": [*torchrun, "--nproc-per-node", str(given.ranks), "plain.py"],
            "hora run": [*hora_run, "plain.py"],
            "hora run, hora.torch": [*hora_run, "with_hora.py"],
        }
        commands = {name: commands[name] for name in given.launchers}
        measures = {name: functools.partial(measure, command, folder) for name, command in commands.items()}
        if given.rounds > 1:
            for one in measures.values():  # once unmeasured: page cache and bytecode
                one()
        found = interleave(measures, given.rounds)
    for what in (*TIMES, *MEMORY):
        values = {name: [one[what] for one in each] for name, each in found.items()}
        report.add({"measure": what, "ranks": given.ranks}, values, unit="bytes" if what in MEMORY else "s")
    print(long_table(report.rows))
    return report.finish(given.json)


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds from the start of the command, and bytes."""
    file = folder / "found.json"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    environ |= {"BENCHMARK_PID": str(os.getpid()), "BENCHMARK_FILE": str(file)}
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) | {"launcher back": ended}
    file.unlink()
    return {what: value - began if what in TIMES else value for what, value in found.items()}


if __name__ == "__main__":
    raise SystemExit(main())

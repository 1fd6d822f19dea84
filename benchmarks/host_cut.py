"""Cut the network between the two hosts of an elastic job, heal it later, and see what becomes of the job.

The hosts are network namespaces, so this needs root. Prints how long the first host's worker took to its next
step, when the other's workers had ended, when they were taken in again, and whether samples and losses are
those of an undisturbed run; exit code 1 if anything is wrong::

    python benchmarks/host_cut.py --lasts 20 --json cut.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _two_hosts import Hosts, two_hosts

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import hora.torch as hora
from hora.core.elastic import control
from hora.core.settings import load

folder, most, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_default_dtype(torch.float64)
hora.init()
torch.manual_seed(0)
inputs = torch.randn(240, 8)
data = (torch.arange(240), inputs, (inputs @ torch.randn(8, 1)).tanh())
loader = hora.data_loader(data, global_batch=24, seed=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
hora.broadcast_parameters(model)
state = hora.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0)
link = control(load())

@hora.elastic.run
def train(state):
    world = -1 if link is None else link.number
    with (folder / f"steps-{os.environ.get('HORA_WORKER', 'alone')}").open("a") as file:
        for ids, x, y in hora.track(loader, epochs=1000):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(pause)
            mean = hora.mean(loss.detach(), weight=len(x))
            end = torch.tensor((folder / "end").exists() or state.step + 1 >= most)
            end = bool(hora.broadcast(end, root_rank=0))
            state.step += 1
            line = {"world": world, "step": state.step, "time": time.time(), "pid": os.getpid()}
            line |= {"loss": float(mean), "ids": ids.tolist(), "place": [hora.rank(), hora.local_rank(),
                     hora.local_size(), hora.cross_rank(), hora.cross_size()]}
            print(json.dumps(line), file=file, flush=True)
            state.commit()
            if end:
                return

train(state)
"""

MARK = "TEST_HOST_CUT"


@dataclasses.dataclass(kw_only=True)
class Found:
    """What happened. Times are seconds from the cut.

    Attributes:
        code: exit code of the job.
        output: what it said.
        worlds: the run's ``worlds.jsonl``.
        next_step: until the first host's worker had made its next step.
        ended: until the lost host's workers had ended.
        back: until a world began with that host again; None: it did not.
        steps: made in all.
        wrong: what is not as it should be.
    """

    code: int
    output: str
    worlds: list[dict[str, Any]]
    next_step: float
    ended: float
    back: float | None
    steps: int
    wrong: list[str]


def main() -> None:
    """Do it, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lasts", type=float, default=20.0, help="seconds from the cut to its healing")
    parser.add_argument("--silence", type=float, default=5.0, help="HORA_HOST_SILENCE")
    parser.add_argument("--slots", type=int, nargs=2, default=(1, 1), help="workers of the two hosts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        found = cut_once(
            Path(folder),
            hosts,
            slots=arguments.slots,
            lasts=arguments.lasts,
            silence=arguments.silence,
            most=2000,
        )
    print(found.output)
    print(f"the other worker's next step: {found.next_step:.1f} s after the cut")
    print(f"the lost host's workers had ended: {found.ended:.1f} s after the cut")
    back = "never" if found.back is None else f"{found.back - arguments.lasts:.1f} s after the healing"
    print(f"taken in again: {back}")
    print(f"{found.steps} steps in {len(found.worlds)} worlds; wrong: {', '.join(found.wrong) or 'nothing'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(found), indent=2))
    sys.exit(bool(found.wrong))


def cut_once(
    folder: Path,
    hosts: Hosts,
    *,
    slots: tuple[int, int],
    lasts: float,
    silence: float,
    most: int = 300,
    pause: float = 0.1,
    patience: float = 60.0,
) -> Found:
    """Run a job on both hosts, cut and heal the network between them, and let it go on for a while."""
    script, program = folder / "train.py", folder / "hosts.sh"
    script.write_text(SCRIPT)
    program.write_text(f"#!/bin/sh\necho localhost:{slots[0]}\necho {hosts.there}:{slots[1]}\n")
    program.chmod(0o755)
    alone = folder / "alone"
    alone.mkdir()
    source = str(Path(__file__).resolve().parents[1] / "src")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environ |= {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", MARK: str(folder)}
    size = sum(slots)
    words = [
        *(*hosts.here, sys.executable, "-m", "hora.cli", "run", "--run-dir", str(folder / "run")),
        *("--min-workers", "1", "-n", str(size), "--hosts-from", str(program)),
        *("--remote-shell", hosts.shell, "--env", f"HORA_HOST_SILENCE={silence}"),
        *("--env", f"{MARK}={folder}", str(script), str(folder), str(most), str(pause)),
    ]
    plain = [sys.executable, str(script), str(alone), str(most), "0"]
    reference = subprocess.Popen(plain, env=environ, stdout=subprocess.DEVNULL)
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(words, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(lambda: _whole(folder, size) and len(_steps(folder, size - 1)) > 4, patience, job)
        victims = {line["pid"] for worker in range(slots[0], size) for line in _steps(folder, worker)}
        cut = time.time()
        hosts.cut()
        _wait(lambda: not any(map(_lives, victims)), patience, job)
        ended = time.time() - cut
        _wait(lambda: len(_worlds(folder)) > 1 and _last_world(folder, 0) > 0, patience, job)
        left = cut + lasts - time.time()
        time.sleep(max(0.0, left))
        hosts.heal()
        _wait(lambda: len(_worlds(folder)) > 2 and _last_world(folder, 0) > 1, patience, job)
        count = len(_steps(folder, 0))
        _wait(lambda: len(_steps(folder, 0)) > count + 4, patience, job)
        (folder / "end").touch()
        job.wait(patience)
    finally:
        for process in (job, reference):
            if process.poll() is None and process is job:
                process.kill()
            process.wait()
    return _look(folder, alone, job.returncode, cut=cut, ended=ended, there=hosts.there, size=size)


def _look(folder: Path, alone: Path, code: int, *, cut: float, ended: float, there: str, size: int) -> Found:
    worlds = _worlds(folder)
    numbers = range(max(max(world["workers"]) for world in worlds) + 1)
    lines = [line | {"worker": number} for number in numbers for line in _steps(folder, number)]
    wrong = [] if code == 0 else [f"exit code {code}"]
    for before, after in itertools.pairwise(worlds):
        late = [line for line in lines if line["world"] == before["number"] and line["time"] > after["time"]]
        if late:
            wrong.append(f"world {before['number']} makes steps while there is world {after['number']}")
    expected = {line["step"]: line for line in _steps(alone, "alone")}
    steps = sorted({line["step"] for line in lines})
    for step in steps:
        same = [line for line in lines if line["step"] == step]
        last = max(line["world"] for line in same)
        same = [line for line in same if line["world"] == last]
        ids = sorted(number for line in same for number in line["ids"])
        if ids != sorted(expected[step]["ids"]):
            wrong.append(f"step {step} has other samples")
        if abs(same[0]["loss"] - expected[step]["loss"]) > 1e-9:
            wrong.append(f"step {step} has another loss")
    if steps != list(range(1, steps[-1] + 1)):
        wrong.append("steps are left out")
    orphans = _marked(str(folder))
    if orphans:
        wrong.append(f"left behind: {orphans}")
    again = [world["time"] - cut for world in worlds[2:] if there in world["hosts"]]
    if len(worlds) != 3 or not again or len(worlds[2]["workers"]) != size:
        wrong.append(f"the worlds are {[world['workers'] for world in worlds]}")
    following = [line["time"] - cut for line in lines if line["world"] == 1]
    return Found(
        code=code,
        output=(folder / "output").read_text(),
        worlds=worlds,
        next_step=min(following, default=float("inf")),
        ended=ended,
        back=min(again, default=None),
        steps=len(steps),
        wrong=wrong,
    )


def _steps(folder: Path, worker: int | str) -> list[dict[str, Any]]:
    path = folder / f"steps-{worker}"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _worlds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "worlds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _whole(folder: Path, size: int) -> bool:
    worlds = _worlds(folder)
    return bool(worlds) and len(worlds[0]["workers"]) == size


def _last_world(folder: Path, worker: int) -> int:
    return int(_steps(folder, worker)[-1]["world"])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _marked(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={text}".encode() in path.read_bytes().split(b"\0") and _lives(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _wait(condition: Callable[[], object], seconds: float, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or job.poll() is not None:
            raise TimeoutError(f"it did not happen within {seconds:g} s (job: {job.poll()})")
        time.sleep(0.02)


if __name__ == "__main__":
    main()

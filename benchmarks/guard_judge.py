"""How long the supervisor works until it has judged a job that hangs, at 64, 256 and 1024 simulated ranks.

No ranks are started: this program writes their boards and sockets itself, and then lets the supervisor's
half of the guard work on them. A job makes eight new kinds of collectives, each checked before it starts.
Then it hangs in one of three ways: one rank calls another collective, one rank is late, or one rank has
ended. Counted is the processor time of the supervisor's half, from the first record to the verdict, and the
time from the hang to the verdict. The hangs and the numbers of ranks take turns, round by round; the ratio is
that to the fewest ranks: how the work grows.

    python benchmarks/guard_judge.py [--sizes 64 256 1024] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from _interleave import Report, arguments, interleave, long_table
from hora.core.rundir import RunDirectory
from hora.guard.board import Board, Phase
from hora.guard.verdict import Verdict
from hora.launch import Job, ScriptTarget
from hora.launch._guard import Guard
from hora.launch._loop import Loop
from hora.launch._start import allow_descriptors
from hora.launch.failure import Outcome

CALLS = 8
"""New kinds of collectives before the job hangs."""

STALL_AFTER = {"late-rank": 2.0}
WAYS = ("mismatched-calls", "late-rank", "subset-call")


class Rank:
    """What one rank would write."""

    def __init__(self, rank: int, link: socket.socket, board: Board) -> None:
        self.link = link
        self._slot = board.slot(rank)
        self._number = 0

    def call(self, name: str, shape: int) -> None:
        """Enter a collective of a new kind, and ask whether it may start."""
        self._number += 1
        signature = {"collective": "allreduce", "dtype": "float32", "shape": [[shape]], "operation": "sum"}
        call = {"kind": "call", "id": self._number, "signature": signature, "text": f"allreduce '{name}'"}
        self._send(call | {"where": f"train.py:{self._number}", "condition": None})
        self._slot.enter(0, self._number, self._number, hash((self._number, shape)) % 2**63)
        self._slot.phase(Phase.CHECKING, 0, self._number, time.monotonic())
        self._send({"kind": "check", "set": 0, "number": self._number})

    def cleared(self) -> bool:
        """Whether the word to go on has come, with which the collective is taken for done."""
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return False
        assert [json.loads(line)["kind"] for line in data.splitlines()] == ["clear"]
        self._slot.phase(Phase.RUNNING, 0, self._number, time.monotonic())
        return True

    def _send(self, record: dict[str, object]) -> None:
        self.link.sendall(json.dumps(record).encode() + b"\n")


def judged(way: str, size: int, folder: Path) -> tuple[float, float]:
    """Seconds of work until the verdict, and the seconds that went by from the moment of the hang."""
    loop = Loop()
    found: list[Verdict] = []
    env = {"HORA_STALL_AFTER": str(STALL_AFTER.get(way, 30.0))}
    job = Job(target=ScriptTarget("train.py"), workers=size, env=env)
    run = RunDirectory.create(folder / f"{way}-{size}-{time.monotonic_ns()}")
    guard = Guard(job, run, loop, say=lambda text: None, alarmed=found.append, announce=False)
    sleeper = subprocess.Popen(["sleep", "600"])
    work = 0.0

    def turn() -> None:
        nonlocal work
        began = time.thread_time()  # without what it sleeps
        loop.turn()
        loop.fire()
        work += time.thread_time() - began

    try:
        ranks = []
        for rank in range(size):
            ends = guard.ends()
            link = socket.socket(fileno=os.dup(ends.inherited[0]))
            link.setblocking(False)
            if rank == 0:
                board = Board(ends.inherited[2], size)
            ranks.append(Rank(rank, link, board))
            guard.started(rank, sleeper)
        guard.all_started()
        for number in range(CALLS):
            waiting = set(ranks)
            for one in ranks:
                one.call(f"gradient {number}", number)
            while waiting:
                turn()
                waiting = {one for one in waiting if not one.cleared()}
        hung = time.monotonic()
        odd = ranks[size // 2]
        for one in ranks:
            if one is not odd or way == "mismatched-calls":
                one.call("loss", 1000 + (one is odd))
        if way == "subset-call":
            guard.ended(Outcome(rank=size // 2, code=0, ended=time.time()))
        while not run.verdicts.exists():
            turn()
        waited = time.monotonic() - hung
        [verdict] = [json.loads(line) for line in run.verdicts.read_text().splitlines()]
        assert verdict["kind"] == way, verdict
        if way == "mismatched-calls":
            assert verdict["ranks"] == [size // 2]
            assert len(found) == 1
        return work, waited
    finally:
        guard.close()
        loop.close()
        for one in ranks:
            one.link.close()
        board.close()
        sleeper.kill()
        sleeper.wait()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    allow_descriptors(8 * max(given.sizes))
    cases = [(way, size) for way in WAYS for size in given.sizes]
    smallest = f"{min(given.sizes)} ranks"
    report = Report("guard_judge", base=smallest)
    with tempfile.TemporaryDirectory() as folder:
        measures = {
            f"{way}, {size}": functools.partial(judged, way, size, Path(folder)) for way, size in cases
        }
        found = interleave(measures, given.rounds)
    for index, what in enumerate(("work until the verdict", "verdict after the hang")):
        for way in WAYS:
            values = {
                f"{size} ranks": [one[index] for one in found[f"{way}, {size}"]] for size in given.sizes
            }
            report.add({"hang": way, "measure": what}, values)
    print(long_table(report.rows))
    return report.finish(given.json)


if __name__ == "__main__":
    raise SystemExit(main())

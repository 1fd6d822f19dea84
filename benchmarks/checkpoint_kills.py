"""SIGKILL while checkpoints are written, at random offsets: every restart finds a good one, and right values.

Two ranks train, and save after every step into one directory. One of them kills itself at a random point of
the writing: after a random number of bytes, or between the system calls around them (mkdir, fsync, rename,
unlink). The other is killed up to 50 ms later. Then the ranks are started again, restore, compare every
value with what it must be at that step, and go on.

    python benchmarks/checkpoint_kills.py --kills 100
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hora.torch as hora
from hora.core.settings import Settings
from hora.core.world import World

RANKS = 2
ELEMENTS = 200_000
"""Of each of the two tensors of the state: 1.6 MB in all, written in about a millisecond."""

CALL = 50_000
"""Bytes that a system call counts as, so that kills fall between them too."""

LIMIT = 60.0
"""Seconds that one attempt may take."""


class Fuse:
    """Kills this process when so many bytes have been written and calls made."""

    def __init__(self, length: int) -> None:
        self._left = length

    def burn(self, length: int) -> None:
        self._left -= length
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def light(self) -> None:
        """Count, from now on, what this process writes and calls."""
        self._wrap("fsync")
        self._wrap("mkdir")
        self._wrap("rename")
        self._wrap("replace")
        self._wrap("unlink")
        self._wrap("rmdir")
        plain = os.write

        def write(descriptor: int, data: Any) -> int:
            if self._left < len(data):
                plain(descriptor, data[: self._left])  # so much of it is there
                self.burn(len(data))
            self.burn(len(data))
            return plain(descriptor, data)

        os.write = write

    def _wrap(self, name: str) -> None:
        plain = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.burn(CALL)
            return plain(*args, **kwargs)

        setattr(os, name, call)


def state_at(step: int) -> dict[str, Any]:
    """The state is a function of the step, so that a restored one can be compared."""
    return {
        "first": torch.arange(ELEMENTS, dtype=torch.float32) + step,
        "second": torch.full((ELEMENTS,), step, dtype=torch.int32),
        "step": step,
    }


def attempt(directory: Path, fuse: Fuse | None, steps: int) -> int | None:
    """Restore, compare, and go on for so many steps; the step that was restored."""
    state = state_at(0)
    step = hora.restore(state, directory=directory)
    if step is not None:
        right = state_at(step)
        assert state["step"] == step, (state["step"], step)
        assert torch.equal(state["first"], right["first"]), f"first at step {step}"
        assert torch.equal(state["second"], right["second"]), f"second at step {step}"
    if fuse is not None:
        fuse.light()
    first = 0 if step is None else step
    for made in range(first + 1, first + steps + 1):
        hora.save(state_at(made), made, directory=directory, keep=2)
    return step


def run(directory: Path, *, fuse: tuple[int, int] | None, delay: float, steps: int) -> list[Any]:
    """One attempt on two forked ranks; what each restored, None for one that was killed."""
    with tempfile.TemporaryDirectory(prefix="hora-kills-") as folder:
        pids, pipes = [], []
        for rank in range(RANKS):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                own = Fuse(fuse[1]) if fuse is not None and fuse[0] == rank else None
                _child(rank, Path(folder), writer, functools.partial(attempt, directory, own, steps))
            os.close(writer)
            pids.append(pid)
            pipes.append(reader)
        return _ended(pids, pipes, delay)


def _child(rank: int, folder: Path, writer: int, body: Callable[[], Any]) -> None:
    code = 1
    try:
        sys.stderr = sys.stdout = (folder / f"log-{rank}").open("w")
        os.dup2(sys.stderr.fileno(), 2)
        world = World(
            rank=rank,
            size=RANKS,
            local_rank=rank,
            local_size=RANKS,
            host_index=0,
            host_count=1,
            source="benchmark",
        )
        hora.init(world, settings=Settings(store=f"file://{folder}/store", timeout=LIMIT))
        step = body()
        hora.shutdown()
        os.write(writer, f"ok {step}".encode())
        code = 0
    except BaseException as error:  # noqa: BLE001 - the child must not return into the caller
        os.write(writer, f"error {error!r}".encode()[:4000])
    finally:
        os._exit(code)


def _ended(pids: list[int], pipes: list[int], delay: float) -> list[Any]:
    """Wait for the ranks; when the first has been killed, kill the others after ``delay`` seconds."""
    deadline, left, killed = time.monotonic() + LIMIT, set(pids), False
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if os.WIFSIGNALED(status) and not killed:
                    killed = True
                    time.sleep(delay)  # the moment is what is varied
                    for other in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(other, signal.SIGKILL)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the ranks did not end in {LIMIT:g} s")
        time.sleep(0.002)
    words = []
    for pipe in pipes:
        word = os.read(pipe, 4096).decode()
        os.close(pipe)
        if word.startswith("error") and not killed:
            raise AssertionError(word)
        words.append(None if not word.startswith("ok") else word[3:])
    return words


def kill_many(
    kills: int, *, seed: int, directory: Path, tell: Callable[[str], None] = print
) -> dict[str, int]:
    """Kill so many times; how many hit, and how the directory looked afterwards.

    Raises:
        AssertionError: a restart found no good checkpoint though one had been committed, or wrong values.
    """
    chosen = random.Random(seed)
    counts = {"kills": 0, "partial": 0, "late": 0}
    (begun,) = set(run(directory, fuse=None, delay=0, steps=2))
    assert begun == "None", begun
    while counts["kills"] < kills:
        # Three saves of some 0.8 MB and 10 calls for each rank.
        fuse = (chosen.randrange(RANKS), chosen.randrange(1, 3 * (800_000 + 10 * CALL)))
        words = run(directory, fuse=fuse, delay=chosen.choice((0, 0, 0.002, 0.01, 0.05)), steps=5)
        counts["late" if None not in words else "kills"] += 1
        folders = sorted(directory.glob("step-*"))
        whole = [int(path.name[5:13]) for path in folders if (path / "commit.json").exists()]
        counts["partial"] += len(whole) < len(folders)
        (restored,) = set(run(directory, fuse=None, delay=0, steps=0))
        assert restored == str(max(whole)), f"{whole} had been committed, and {restored} was restored"
        if counts["kills"] % 20 == 0:
            tell(f"{counts['kills']} kills, at step {restored}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="hora-checkpoints-"))
    try:
        counts = kill_many(arguments.kills, seed=arguments.seed, directory=directory)
    finally:
        shutil.rmtree(directory)
    print(
        f"{counts['kills']} kills while checkpoints were written, {counts['partial']} of which left one half "
        "written; every restart resumed from a good one, with the values of its step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

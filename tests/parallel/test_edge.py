"""The step edge: ranks that are asked to stop at different moments stop at the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.notices import EXIT_STOPPED, StopForNow
from hora.torch import _edge
from hora.torch._edge import step_edge


def steps_until_asked(signals: dict[tuple[int, int], int], *, most: int = 50) -> int:
    """How many steps a rank makes; ``signals``: (rank, step) -> signal that it gets in that step."""
    edge = step_edge()
    for step in range(1, most + 1):
        if (hora.rank(), step) in signals:
            os.kill(os.getpid(), signals[hora.rank(), step])
        hora.allreduce(torch.ones(()), name="gradient")
        if edge.asked():
            return step
    return -1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_one_edge_after_the_one_that_was_asked(size: int, number: int) -> None:
    def body() -> int:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the stack dump of the tests
        return steps_until_asked({(size - 1, 4): number})

    # Alone there is nobody to agree with.
    assert run_ranks(size, body) == [4 if size == 1 else 5] * size


def test_short_steps_agree_at_every_eighth_edge_and_stop_together() -> None:
    def body() -> tuple[int, int]:
        before = _edge.allreduce_async
        calls = []
        _edge.allreduce_async = lambda *a, **k: (calls.append(1), before(*a, **k))[1]  # type: ignore[assignment]
        asked = steps_until_asked({(1, 130): signal.SIGTERM}, most=200)
        return asked, len(calls)

    (first, calls), second = run_ranks(2, body)
    assert second == (first, calls)
    assert 130 < first <= 130 + _edge.MOST_EDGES + 1
    # 64 edges and one more, as what they tell is read one edge later; then every eighth, had no step a hitch.
    assert calls < 64 + 1 + (first - 64) / 2


@ranks(3)
def test_each_asked_at_another_step() -> None:
    term = signal.SIGTERM
    assert steps_until_asked({(2, 3): term, (0, 4): term, (1, 7): term}) == 4


@pytest.mark.alone
@ranks(2)
def test_a_slow_rank_is_not_waited_for_before_the_next_edge() -> None:
    edge = step_edge()
    assert not edge.asked()
    hora.barrier()
    if hora.rank() == 1:
        time.sleep(0.5)
    began = time.monotonic()
    assert not edge.asked()  # starts a second all-reduce, in which rank 1 is late
    took = time.monotonic() - began
    assert took < 0.4
    assert not edge.asked()


@ranks(2)
def test_without_a_signal_nothing_stops_and_the_last_edge_is_nobodys_to_wait_for() -> None:
    assert steps_until_asked({}, most=20) == -1
    assert not hora.context().pending  # else the end of the job is taken for that of a failure


@ranks(1)
def test_signals_are_given_back_and_those_of_others_left_alone() -> None:
    calls: list[int] = []
    own = lambda number, _: calls.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    edge = step_edge()
    assert step_edge() is edge
    # The tests' own stack dump on SIGUSR1 is caught in C, where Python does not see it.
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    assert edge.asked()
    assert calls == [signal.SIGTERM]  # the script's own handler was called too
    hora.shutdown()
    assert signal.getsignal(signal.SIGTERM) is own
    assert not _edge.expected()


@ranks(1)
def test_a_child_that_was_forked_ends_by_sigterm_as_ever() -> None:
    step_edge()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")  # Python forgets what comes in the midst of a fork
        time.sleep(20)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


@ranks(1)
def test_a_second_signal_ends_a_rank_without_a_launcher_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[int] = []
    monkeypatch.setattr(_edge, "_die", died.append)
    step_edge()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the same request: a scheduler's, and the launcher's
    assert died == []
    monkeypatch.setattr(_edge, "ONE_REQUEST", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert died == [signal.SIGTERM]


@ranks(2)
def test_stopping_is_an_exit_with_75() -> None:
    with pytest.raises(StopForNow) as stopped:
        step_edge().stop(3)
    assert stopped.value.code == EXIT_STOPPED == 75


SCRIPT = """
import os, signal, sys, time
import torch
import hora.torch as hora
from hora.torch._edge import step_edge
hora.init()
edge = step_edge()
open(f"ready-{hora.rank()}", "w").close()
for step in range(1, 4000):
    time.sleep(0.005)
    hora.allreduce(torch.ones(()), name="gradient")
    if edge.asked():
        print("stopped at", step, flush=True)
        edge.stop(step)
"""


@pytest.mark.parametrize("persistent", [False, True])
@ranks(2)
def test_loader_processes_outlive_the_signals_and_end_with_the_loader(
    persistent: bool, tmp_path: Path
) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    # The loader's processes start before the first step edge, from which on the rank waits for signals.
    hora.Checkpoints({}, directory=tmp_path)
    dataset = [torch.tensor([index]) for index in range(64)]
    loader = hora.data_loader(
        dataset,
        global_batch=4,
        num_workers=2,
        shuffle=False,
        persistent_workers=persistent,
        prefetch_factor=1,  # what follows the signal is not loaded yet
    )
    seen: list[int] = []
    stopped_at = 0
    for step, batch in enumerate(loader, start=1):
        seen += batch.flatten().tolist()
        if step == 3:
            children = [
                int(pid)
                for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            ]
            assert len(children) == 2
            for pid in (*children, os.getpid()):  # as Slurm does
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGUSR1)
        if step_edge().asked():
            stopped_at = step
            break
    first = 2 * hora.rank()
    assert seen == [first + 4 * step + offset for step in range(stopped_at) for offset in (0, 1)]
    assert stopped_at == 4
    assert loader.state_dict() == {"position": 4 * stopped_at}
    del batch
    loader._fetcher._loader._iterator = None
    deadline = time.monotonic() + 8
    while any(
        Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in children
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_under_hora_run(tmp_path: Path) -> None:
    """Real programs: what is tested is who gets a signal, and what becomes of an exit code."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hora.cli", "run", "-n", "2", "--run-dir", "run"]
    out, err, process = asked(tmp_path, [*command, "train.py"], signal.SIGUSR1)
    assert process.returncode == 75, err
    first, second = sorted(out.splitlines())
    assert first.split("stopped at")[1] == second.split("stopped at")[1]
    assert "hora: stopped by SIGUSR1 after step " in err
    assert not (tmp_path / "run" / "verdicts.jsonl").exists()


def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out, err, process = asked(tmp_path, [*command, "train.py"], signal.SIGTERM)
    assert process.returncode != 0
    assert out.count("stopped at") == 2, err
    assert len(set(out.split("stopped at ")[1:])) == 1


def asked(folder: Path, command: list[str], number: int) -> tuple[str, str, subprocess.Popen[str]]:
    """What a job of two ranks prints that gets a signal in its loop; nothing of it is left running."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hora.__file__).parents[2])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    try:
        deadline = time.monotonic() + 60
        while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)  # until the launcher has heard that the ranks have step edges
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return out, err, process

"""Waiting for the shared-memory engine: callbacks, threads, signals, and processes forked meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora
from hora.torch.engines._team import SLOT


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


# --- callbacks ------------------------------------------------------------------------------------


@ranks(1, 2, 3)
def test_a_callback_calls_collectives() -> None:
    for count in (3, SLOT):  # one that may end in the call, one that ends in wait() or in the thread
        first, second, third = (torch.ones(count) for _ in range(3))

        def more(_: Any, second: torch.Tensor = second, third: torch.Tensor = third) -> torch.Tensor:
            dist.all_reduce(second)
            dist.all_reduce(third, async_op=True).get_future().wait()
            return second + third

        work = dist.all_reduce(first, async_op=True)
        chained = work.get_future().then(more)
        work.wait()
        assert chained.wait()[0] == 2 * hora.size()
        assert (first[0], second[-1], third[-1]) == (hora.size(),) * 3


@ranks(2)
def test_a_callback_that_fails_harms_nothing() -> None:
    def fail(_: Any) -> None:
        raise ValueError("mine")

    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail)
    with pytest.raises(Exception, match="mine"):
        future.wait()
    dist.barrier()


@ranks(2, 3)
def test_hooks_of_ddp_that_call_collectives_in_callbacks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def gradients(hook: Any, group: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        wrapped = DistributedDataParallel(layers, process_group=group)
        state = (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            if hook is powerSGD_hook.powerSGD_hook
            else group
        )
        wrapped.register_comm_hook(state, hook)
        for step in range(4):
            wrapped.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hora.rank())
            wrapped(torch.randn(5, 16, generator=generator)).square().sum().backward()
        return [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]

    gloo = dist.new_group(backend="gloo")
    for hook in (default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        for mine, reference in zip(gradients(hook, dist.group.WORLD), gradients(hook, gloo), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-2, atol=1e-2)


# --- threads --------------------------------------------------------------------------------------


@ranks(2, 3)
def test_groups_in_threads_of_their_own() -> None:
    groups = [dist.new_group(list(range(hora.size()))) for _ in range(3)]
    wrong: list[Any] = []

    def use(number: int) -> None:
        tensors = [torch.full((1 + 997 * i,), float(number + i)) for i in range(30)]
        works = [
            dist.all_reduce(tensor, group=groups[number], async_op=i % 3 > 0)
            for i, tensor in enumerate(tensors)
        ]
        for work in works[::-1]:
            if work is not None:
                work.wait()
        wrong.extend(i for i, each in enumerate(tensors) if each[-1] != (number + i) * hora.size())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@ranks(2)
def test_the_same_tensor_in_two_operations_and_works_that_nobody_keeps() -> None:
    tensor = torch.ones(SLOT)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    for _ in range(5):
        dist.all_reduce(torch.ones(1000), async_op=True)
    works[2].wait()
    assert torch.equal(tensor, torch.full_like(tensor, 8))


# --- signals --------------------------------------------------------------------------------------


class Alarm(Exception):
    """What the tests' signal handlers raise."""


@ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_signal_handler_that_raises_ends_the_wait_on_every_rank(asynchronous: bool) -> None:
    def handler(*_: Any) -> None:
        raise Alarm

    if hora.rank() == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            if asynchronous:
                dist.barrier(async_op=True).wait()
            else:
                dist.barrier()
        with pytest.raises(RuntimeError, match="barrier ended by Alarm"):
            dist.barrier()
        store().set("over", "1")
        store().wait(["heard"], timedelta(seconds=10))
    else:
        store().wait(["over"], timedelta(seconds=10))
        dist.barrier()  # to which rank 0 had come
        with pytest.raises(dist.DistBackendError, match="Rank 0 has given up: barrier ended by Alarm"):
            dist.barrier()
        store().set("heard", "1")


@ranks(2)
def test_a_signal_at_any_moment_leaves_no_lock_behind() -> None:
    """Each round breaks a group of its own; whatever is called then raises and does not wait."""

    def handler(*_: Any) -> None:
        raise Alarm

    signal.signal(signal.SIGALRM, handler)
    for round_ in range(12):
        group = dist.new_group([0, 1])
        ended = threading.Event()

        def use(group: Any = group) -> None:
            tensor = torch.ones(100)
            while True:
                works = [dist.all_reduce(tensor, group=group, async_op=i % 2 > 0) for i in range(4)]
                works[1].wait()

        with contextlib.suppress(Alarm, RuntimeError):
            if hora.rank() == round_ % 2:
                signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.0017 * round_)
            use()
        signal.setitimer(signal.ITIMER_REAL, 0)

        def call(group: Any = group, ended: threading.Event = ended) -> None:
            with pytest.raises(RuntimeError):
                dist.barrier(group=group)
            ended.set()

        threading.Thread(target=call, daemon=True).start()
        assert ended.wait(5)
        dist.barrier()
        dist.destroy_process_group(group)


# --- forked processes -------------------------------------------------------------------------------


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@ranks(2)
def test_a_forked_process_is_no_rank() -> None:
    group: Any = dist.group.WORLD
    work = dist.barrier(async_op=True) if hora.rank() == 0 else None
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for call in (
                dist.barrier,
                lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
                work and work.wait,
            ):
                if call:
                    with pytest.raises(
                        RuntimeError, match=rf"forked from rank {hora.rank()} and is not a rank"
                    ):
                        call()
            group.shutdown()
            code = 0
        os._exit(code)
    assert exit_code(pid) == 0
    if work is None:
        dist.barrier()
    else:
        work.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == 2


@ranks(2)
def test_a_forked_process_that_ends_like_a_program() -> None:
    work = dist.all_reduce(torch.ones(SLOT), async_op=True)
    pid = os.fork()
    if pid == 0:
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert exit_code(pid) == 0
    work.wait()
    dist.barrier()


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index * index


@ranks(2)
@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_while_operations_are_pending(persistent: bool) -> None:
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, persistent_workers=persistent
    )
    for _ in range(2):
        works = []
        for batch in loader:
            total = batch.clone()
            works.append((dist.all_reduce(total, async_op=True), batch, total))
        for work, batch, total in works:
            work.wait()
            assert torch.equal(total, 2 * batch)
    del loader


# --- the end of the interpreter -----------------------------------------------------------------------

ENDINGS = {
    "pending": ("work = dist.all_reduce(tensor, async_op=True) if rank == 0 else None", [0, 0], ""),
    "exception": (
        "works = [dist.all_reduce(tensor, async_op=True) for _ in range(9)]\n"
        "if rank == 0: raise ValueError('mine')\n"
        "while True: dist.all_reduce(tensor)",
        [1, 1],
        "Rank 0 has (ended|left the group), and would never come",
    ),
    "thread": (
        "import threading\n"
        "call = lambda: [dist.all_reduce(tensor) for _ in range(3 - rank)]\n"
        "thread = threading.Thread(target=call, daemon=True); thread.start(); thread.join(0.2)",
        [0, 0],
        "",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_while_something_is_under_way(ending: str, tmp_path: Path) -> None:
    lines, codes, words = ENDINGS[ending]
    script = (
        "import sys, torch, torch.distributed as dist, hora.torch.engines\n"
        "rank = int(sys.argv[1])\n"
        "store = dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('hora', store=store, rank=rank, world_size=2)\n"
        f"tensor = dist.group.WORLD.empty({SLOT}, torch.float32)\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script + lines, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [each.communicate(timeout=25)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == codes, errors
    assert re.search(words, errors[1])
    assert not re.search("terminate called|Fatal Python error|C\\+\\+", "".join(errors))

"""Joining a job, leaving it, and being told what is wrong with either."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import AlreadyInitializedError, NotInitializedError, SettingError, WorldError
from hora.core.settings import Settings
from hora.core.world import World

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def alone() -> Iterator[None]:
    """For tests that call ``init`` in the test process itself."""
    yield
    hora.shutdown()


ONE_TENSOR = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "reducescatter",
    "reducescatter_async",
]
A_GROUP = [
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
]


def needing_init() -> dict[str, Callable[[], Any]]:
    tensor = torch.ones(1)
    return {
        "rank": hora.rank,
        "size": hora.size,
        "local_rank": hora.local_rank,
        "local_size": hora.local_size,
        "cross_rank": hora.cross_rank,
        "cross_size": hora.cross_size,
        "device": hora.device,
        "context": hora.context,
        "barrier": hora.barrier,
        "join": hora.join,
        "is_homogeneous": hora.is_homogeneous,
        **{name: functools.partial(getattr(hora, name), tensor) for name in ONE_TENSOR},
        **{name: functools.partial(getattr(hora, name), [tensor]) for name in A_GROUP},
        "sparse_allreduce_async": lambda: hora.sparse_allreduce_async(tensor.to_sparse()),
        "add_process_set": lambda: hora.add_process_set([0]),
        "remove_process_set": lambda: hora.remove_process_set(hora.global_process_set),
        "process_set_included": hora.process_set_included,
        "process_set_ids": hora.process_set_ids,
        "start_timeline": lambda: hora.start_timeline("unused.json"),
        "stop_timeline": hora.stop_timeline,
        "broadcast_object": lambda: hora.broadcast_object(1),
        "allgather_object": lambda: hora.allgather_object(1),
        "broadcast_parameters": lambda: hora.broadcast_parameters({}),
        "broadcast_optimizer_state": lambda: hora.broadcast_optimizer_state(
            torch.optim.SGD([tensor], lr=1.0)
        ),
        "DistributedOptimizer": lambda: hora.DistributedOptimizer(torch.optim.SGD([tensor], lr=1.0)),
        "data_loader": lambda: hora.data_loader((tensor,), global_batch=1),
        "mean": lambda: hora.mean(1.0),
        "track": lambda: hora.track([]),
        "only": hora.only,
        "save": lambda: hora.save({}, 1),
        "restore": lambda: hora.restore({}),
    }


def test_everything_before_init_names_itself() -> None:
    functions = needing_init()
    free = {"init", "shutdown", "is_initialized", "poll", "synchronize", "global_process_set"}
    free |= {name for name in hora.__all__ if name.endswith(("_built", "_enabled", "_supported"))}
    free |= {name for name in hora.__all__ if name[0].isupper()} - {"DistributedOptimizer"}
    assert set(functions) | free == set(hora.__all__)
    for name, call in functions.items():
        with pytest.raises(NotInitializedError, match=rf"hora.torch.{name}\(\) was called before"):
            call()
    hora.shutdown()
    assert not hora.is_initialized()


def test_a_second_init_names_the_first(alone: None) -> None:
    line = sys._getframe().f_lineno + 1
    hora.init(World())
    with pytest.raises(AlreadyInitializedError, match=re.escape(f"{__file__}:{line}")):
        hora.init(World())


def test_one_worker_is_a_job_too(alone: None) -> None:
    before = dict(os.environ)
    hora.init(World())
    assert (hora.rank(), hora.size(), hora.local_rank(), hora.local_size()) == (0, 1, 0, 1)
    assert (hora.cross_rank(), hora.cross_size(), hora.device().type) == (0, 1, "cpu")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # code that uses torch.distributed runs unchanged
    assert tensor.tolist() == [1.0] * 3
    hook = sys.excepthook
    hora.shutdown()
    hora.shutdown()
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="HORA_DEVICE=cuda, but PyTorch finds no GPU"):
        hora.init(World(), settings=Settings(device="cuda"))
    assert not hora.is_initialized()


def test_more_workers_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World(rank=3, size=4, local_rank=3, local_size=4)
    with pytest.raises(WorldError, match=r"4 workers on this host, but 2 GPUs.*Start 2 workers"):
        hora.init(world, settings=Settings())


def test_ranks_that_cannot_meet_are_told_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match=r"Rank 1 of 4 .*Export MASTER_ADDR .* and MASTER_PORT"):
        hora.init(World(rank=1, size=4, local_rank=0, local_size=1, host_index=-1, host_count=-1))
    with pytest.raises(WorldError, match="neither tcp://HOST:PORT nor file:///PATH"):
        hora.init(World(rank=1, size=2), settings=Settings(store="redis://here"))
    assert not dist.is_initialized()


def test_an_absent_rank_is_named(tmp_path: Path) -> None:
    world = World(rank=0, size=3, local_rank=0, local_size=3)
    settings = Settings(store=f"file://{tmp_path}/store", timeout=0.5)
    with pytest.raises(WorldError, match=r"Ranks 1, 2 of 3 did not come within 0.5 s"):
        hora.init(world, settings=settings)
    assert not hora.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def engine_threads() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


@ranks(2)
def test_init_and_shutdown_again_and_again() -> None:
    context = hora.context()
    for round_ in range(8):
        model = torch.nn.Linear(2, 2)
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        hora.shutdown()
        assert not engine_threads()
        optimizer.step()  # its gradients were averaged before
        with pytest.raises(NotInitializedError, match="made before hora.torch.shutdown"):
            optimizer.step()
        with pytest.raises(NotInitializedError):
            hora.rank()
        hora.init(context.world, settings=context.settings)
        assert hora.allreduce(torch.tensor(float(hora.rank() + round_)), op=hora.Sum) == 1 + 2 * round_


@ranks(2)
def test_a_forked_child_does_not_tear_the_job_down() -> None:
    pid = os.fork()
    if pid == 0:
        hora.shutdown()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert hora.allreduce(torch.ones(()), op=hora.Sum) == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_listening_socket_serves_as_the_store() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]

    def body(world: World, settings: Settings) -> float:
        given = Settings(
            store=f"tcp://127.0.0.1:{port}", store_fd=os.dup(listener.fileno()), timeout=20, progress="off"
        )
        total = 0.0
        for _ in range(3):
            hora.init(world, settings=given)
            total += hora.allreduce(torch.ones(()), op=hora.Sum).item()
            hora.shutdown()
        hora.init(world, settings=given)
        return total

    try:
        assert run_ranks(2, body, init=False) == [6.0, 6.0]
    finally:
        listener.close()


def test_master_variables_are_enough() -> None:
    port = free_port()

    def body(world: World, settings: Settings) -> float:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        hora.init(world, settings=Settings(timeout=20))
        hora.shutdown()
        hora.init(world, settings=Settings(timeout=20))
        return hora.allreduce(torch.ones(()), op=hora.Sum).item()

    assert run_ranks(2, body, init=False) == [2.0, 2.0]


def test_mpi_ranks_of_one_host_meet_through_their_launcher() -> None:
    def body(world: World, settings: Settings) -> float:
        os.environ |= {"PMI_RANK": str(world.rank)}
        hora.init(world, settings=Settings(timeout=20))
        return hora.allreduce(torch.ones(()), op=hora.Sum).item()

    before = set(Path(tempfile.gettempdir()).glob(f"hora-{os.getuid()}-*"))
    assert run_ranks(3, body, init=False) == [3.0, 3.0, 3.0]
    assert set(Path(tempfile.gettempdir()).glob(f"hora-{os.getuid()}-*")) == before


def test_ranks_agree_on_hosts_when_the_launcher_does_not_say() -> None:
    def body(world: World, settings: Settings) -> tuple[int, ...]:
        name = "first" if world.rank in (0, 2) else "second"
        socket.gethostname = lambda: name  # type: ignore[assignment]
        pretended = World(
            rank=world.rank, size=4, local_rank=world.rank // 2, local_size=2, host_index=-1, host_count=-1
        )
        hora.init(pretended, settings=settings)
        found = hora.context().world
        return found.host_index, found.host_count, hora.cross_rank(), hora.cross_size()

    assert run_ranks(4, body, init=False) == [(0, 2, 0, 2), (1, 2, 1, 2), (0, 2, 0, 2), (1, 2, 1, 2)]


def test_cross_size_counts_only_hosts_with_this_local_rank() -> None:
    def body(world: World, settings: Settings) -> tuple[int, int]:
        host, local_rank = [(0, 0), (0, 1), (1, 0)][world.rank]
        uneven = World(
            rank=world.rank, size=3, local_rank=local_rank, local_size=2 - host, host_index=host, host_count=2
        )
        hora.init(uneven, settings=settings)
        return hora.cross_rank(), hora.cross_size()

    assert run_ranks(3, body, init=False) == [(0, 2), (0, 1), (1, 2)]


def test_a_group_of_the_script_is_adopted_and_left_alone() -> None:
    def body(world: World, settings: Settings) -> bool:
        store = dist.FileStore(f"{settings.store.removeprefix('file://')}.own", world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        with pytest.raises(
            WorldError, match=rf"initialized with rank {world.rank} of 2, but no launcher was found"
        ):
            hora.init(settings=settings)
        hora.init(world, settings=settings)
        assert hora.allreduce(torch.ones(()), op=hora.Sum) == 2
        hora.shutdown()
        assert dist.is_initialized()
        dist.destroy_process_group()
        return True

    assert run_ranks(2, body, init=False) == [True, True]


def test_the_timeline_of_each_rank_is_written(tmp_path: Path) -> None:
    def body(world: World, settings: Settings) -> None:
        hora.init(world, settings=Settings(**{**vars(settings), "run_dir": tmp_path / "run"}))
        model = torch.nn.Linear(2, 1)
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for (x,) in hora.track(hora.data_loader((torch.ones(4, 2),), global_batch=2)):
            model(x).sum().backward()
            optimizer.step()
        hora.allreduce(torch.ones(3), name="of ones")

    run_ranks(2, body, init=False)
    for rank in range(2):
        events = (tmp_path / "run" / "events" / f"rank-{rank}.jsonl").read_text()
        for name in ("allreduce", "of ones", "wait for gradients", "average gradients", "wait for data"):
            assert f'"{name}"' in events


THREADS = """
    import os
    import torch
    import hora.torch as hora

    def threads():
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
        return [name for name in names if "gloo" in name]

    hora.init()
    model = torch.nn.Linear(2, 2)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert threads()
    hora.shutdown()
    assert not threads(), threads()
"""


def test_shutdown_ends_the_threads_of_the_group() -> None:
    # A thread left to the interpreter's end may touch Python while that is taken down, which aborts.
    done = script(THREADS)
    assert done.returncode == 0, done.stderr


def script(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=kept | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_failing_rank_ends_at_once_with_its_own_traceback(tmp_path: Path) -> None:
    # Rank 1 waits in a collective that rank 0 never joins, while rank 0 fails with one in flight.
    done = script(
        f"""
        import os
        import torch, torch.distributed as dist
        import hora.torch as hora
        from hora.core.settings import Settings
        from hora.core.world import World
        torch.set_num_threads(1)
        rank = 0 if os.fork() else 1
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        hora.init(world, settings=Settings(store="file://{tmp_path}/store", timeout=50))
        if rank:
            try:
                hora.broadcast(torch.ones(3), root_rank=0)
            except RuntimeError as error:
                print("rank 1 was told:", type(error).__name__, flush=True)
        else:
            work = dist.all_reduce(torch.ones(5), async_op=True)
            hora.context().pending.add(work)
            def fail():
                raise ArithmeticError("on purpose")
            fail()
        """
    )
    assert "ArithmeticError: on purpose" in done.stderr
    assert "terminate called" not in done.stderr
    assert "rank 1 was told" in done.stdout  # though its group still had 50 s to wait
    assert done.returncode == 1

"""The engine over several hosts: network namespaces, joined by a pair of virtual cables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel import test_engine_data as data
from tests.parallel.test_engine_stalls import listen
from tests.ranks import run_ranks

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch.engines import _create
from hora.torch.engines._hosts import HostsGroup

BODY = """
    import os, torch, torch.distributed as dist
    import hora.torch as hora
    from hora.torch.engines._hosts import HostsGroup

    hora.init()
    rank, size = hora.rank(), hora.size()
    group = dist.group.WORLD
    assert isinstance(group, HostsGroup), type(group)
    assert group.team.size == hora.local_size()
    assert hora.cross_size() == 2 or size == 3
    everyone = torch.arange(size, dtype=torch.float64)
    for count in (1, 1000, 3_000_001):
        for op, expected in ((dist.ReduceOp.SUM, everyone.sum()), (dist.ReduceOp.MAX, everyone.max())):
            tensor = torch.full((count,), float(rank), dtype=torch.float64)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, torch.full_like(tensor, expected.item()))
        for root in range(size):
            tensor = torch.full((count,), float(rank))
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, torch.full_like(tensor, root))
    for dtype in (torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64):
        tensor = torch.ones(5, dtype=dtype)
        dist.all_reduce(tensor)
        expected = torch.ones(5, dtype=dtype) if dtype is torch.bool else torch.full((5,), size).to(dtype)
        assert torch.equal(tensor, expected), tensor
    output = torch.empty(2)
    dist.reduce_scatter_single(output, torch.arange(2.0 * size))
    assert torch.equal(output, size * torch.tensor([2.0 * rank, 2.0 * rank + 1]))
    flat = torch.empty(size, dtype=torch.int64)
    dist.all_gather_single(flat, torch.tensor([rank]))
    assert flat.tolist() == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    for count in (1, 3, 300_007):
        for root in range(size):
            mine = torch.full((count,), 10.0 * rank + root, dtype=torch.float64)
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, gathered, root)
            for other, part in enumerate(gathered or []):
                assert torch.equal(part, torch.full_like(part, 10.0 * other + root))
            parts = [torch.full((count,), 10 * root + other, dtype=torch.int16) for other in range(size)]
            part = torch.empty(count, dtype=torch.int16)
            dist.scatter(part, parts if rank == root else None, root)
            assert torch.equal(part, torch.full_like(part, 10 * root + rank))
            total = torch.full((count,), float(rank))
            dist.reduce(total, root)
            assert torch.equal(total, torch.full_like(total, everyone.sum().item() if rank == root else rank))
        sent = [count * ((rank + 2 * other) % 3) for other in range(size)]
        received = [count * ((other + 2 * rank) % 3) for other in range(size)]
        rows = torch.cat([torch.full((n, 2), 10.0 * rank + i) for i, n in enumerate(sent)])
        output = torch.empty(sum(received), 2)
        dist.all_to_all_single(output, rows, received, sent)
        expected = torch.cat([torch.full((n, 2), 10.0 * i + rank) for i, n in enumerate(received)])
        assert torch.equal(output, expected)
        outputs = [torch.empty(n, 2) for n in received]
        dist.all_to_all(outputs, list(rows.split(sent)))
        assert torch.equal(torch.cat(outputs), expected)
    model = torch.nn.Linear(3, 2).double()
    hora.broadcast_parameters(model)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model.weight.detach().clone()
    model(torch.full((1, 3), float(rank)).double()).sum().backward()
    optimizer.step()
    moved = (before - model.weight.detach()) / 0.1
    assert torch.allclose(moved, torch.full_like(moved, everyone.mean().item()), rtol=1e-12)
    dist.barrier()
    hora.shutdown()
    print("good", rank)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces that reach each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    names = [f"hora{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system gives no network namespaces: {error.stderr.strip()}")
    try:
        ip(
            "link",
            "add",
            "hora0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "hora0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.73.0.{number}/24", "dev", "hora0")
            ip("-n", name, "link", "set", "hora0", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.parametrize("workers", [(2, 2), (2, 1)], ids=str)
def test_two_hosts(hosts: list[str], workers: tuple[int, int], tmp_path: Path) -> None:
    script = tmp_path / "body.py"
    script.write_text(textwrap.dedent(BODY))
    running, rank = [], 0
    for host, count in zip(hosts, workers, strict=True):
        for local in range(count):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": sum(workers),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": "10.73.0.1",
                "MASTER_PORT": 29600,
                "GLOO_SOCKET_IFNAME": "hora0",
                "OMP_NUM_THREADS": 1,
                "HORA_TIMEOUT": 20,
            }
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            command = ["ip", "netns", "exec", host, sys.executable, str(script)]
            running.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            rank += 1
    try:
        outputs = [each.communicate(timeout=60)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [output.strip().splitlines()[-1] for output in outputs] == [
        f"good {each}" for each in range(rank)
    ], outputs


def on_hosts(hosts: str, settings: Settings, world: World) -> None:
    """Ranks believe that they are on the host of their letter, so Gloo carries what their leaders have."""
    _create._host = lambda: f"machine{hosts[world.rank]} host{hosts[world.rank]}"
    hora.init(world, settings=settings)
    group = dist.group.WORLD
    assert isinstance(group, HostsGroup)
    assert group.team.size == hosts.count(hosts[world.rank])


HOSTS = ["aab", "aaabb", "abab", "abbca"]
"""By rank. Hosts have unequal numbers of ranks, which need not follow each other."""


@pytest.mark.parametrize("hosts", HOSTS)
def test_random_calls_against_references(hosts: str) -> None:
    def body(world: World, settings: Settings) -> None:
        on_hosts(hosts, settings, world)
        for seed in range(2):
            data.test_random_calls(seed)

    run_ranks(len(hosts), body, init=False)


@pytest.mark.parametrize("hosts", ["aab", "abab"])
def test_memory_that_overlaps(hosts: str) -> None:
    def body(world: World, settings: Settings) -> None:
        on_hosts(hosts, settings, world)
        for place in ("own", "first", "between"):
            data.test_reduce_scatter_into_its_input(place, False)
            data.test_all_gather_of_a_part_of_its_output(place, False)
        data.test_all_to_all_within_one_tensor()

    run_ranks(len(hosts), body, init=False)


@pytest.mark.parametrize("hosts", HOSTS)
def test_all_to_all_of_any_lengths(hosts: str) -> None:
    """Rank s sends (s + 2 r) % 4 rows of ten times s plus r to rank r."""

    def body(world: World, settings: Settings) -> None:
        on_hosts(hosts, settings, world)
        rank, size = world.rank, world.size
        for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.complex64):
            for scale in (1, 30_000):
                sent = [scale * ((rank + 2 * other) % 4) for other in range(size)]
                received = [scale * ((other + 2 * rank) % 4) for other in range(size)]
                inputs = [torch.full((n, 2), 10 * rank + i).to(dtype) for i, n in enumerate(sent)]
                expected = torch.cat([torch.full((n, 2), 10 * i + rank) for i, n in enumerate(received)]).to(
                    dtype
                )
                output = torch.empty_like(expected)
                dist.all_to_all_single(output, torch.cat(inputs), received, sent)
                assert torch.equal(output, expected)
                outputs = [torch.empty(n, 2, dtype=dtype) for n in received]
                works = [
                    dist.all_to_all(outputs, inputs, async_op=True),
                    dist.all_reduce(torch.ones(2), async_op=True),
                ]
                for work in works:
                    work.wait()
                assert torch.equal(torch.cat(outputs), expected)

    run_ranks(len(hosts), body, init=False)


@pytest.mark.parametrize("hosts", HOSTS)
def test_lists_and_averages_against_float64(hosts: str) -> None:
    def body(world: World, settings: Settings) -> None:
        on_hosts(hosts, settings, world)
        rank, size = world.rank, world.size
        generator = torch.Generator().manual_seed(7)
        exact = torch.randn(size, size, 1001, generator=generator, dtype=torch.float64)
        rows = exact.float()
        exact = rows.double()
        output = torch.empty(1001)
        dist.reduce_scatter(output, list(rows[rank]), dist.ReduceOp.AVG)
        torch.testing.assert_close(output.double(), exact[:, rank].mean(0), rtol=1e-6, atol=1e-6)
        for root in range(size):
            mine = rows[rank, root].clone()
            dist.reduce(mine, root, dist.ReduceOp.AVG)
            if rank == root:
                torch.testing.assert_close(mine.double(), exact[:, root].mean(0), rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(mine, rows[rank, root])
        parts = [[torch.empty(1001), torch.empty(7)] for _ in range(size)]
        group: Any = dist.group.WORLD
        group.allgather_coalesced(parts, [rows[rank, 0], rows[rank, 1, :7].clone()]).wait()
        assert torch.equal(torch.stack([part[0] for part in parts]), rows[:, 0])
        assert torch.equal(torch.stack([part[1] for part in parts]), rows[:, 1, :7])
        objects: list[Any] = [None] * size if rank == size - 1 else []
        dist.gather_object({"rank": rank}, objects or None, dst=size - 1)
        assert rank != size - 1 or objects == [{"rank": each} for each in range(size)]
        pair = dist.new_group([0, size - 1])
        both = torch.full((3,), float(rank))
        if rank in (0, size - 1):
            dist.all_reduce(both, group=pair)
            assert both.tolist() == [size - 1] * 3

    run_ranks(len(hosts), body, init=False)


def test_every_dtype_between_hosts_that_only_seem_so() -> None:
    """Two by two the ranks believe that they are on one host, so Gloo carries what their leaders have."""

    def body(world: World, settings: Settings) -> None:
        _create._host = lambda: f"machine{world.rank // 2} host"
        hora.init(world, settings=settings)
        assert isinstance(dist.group.WORLD, HostsGroup)
        for dtype in (
            torch.float8_e4m3fn,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.int16,
            torch.bfloat16,
        ):
            numbers = [torch.tensor([1, 2 + rank, 7 - rank], dtype=torch.int64) for rank in range(4)]
            if not dtype.is_floating_point:
                numbers[2][0] = torch.iinfo(dtype).max - 8 if dtype is not torch.uint64 else -9
            for op, expected in (
                (dist.ReduceOp.SUM, sum(numbers)),
                (dist.ReduceOp.MAX, torch.tensor([numbers[2][0], 5, 7])),
                (dist.ReduceOp.MIN, torch.tensor([1, 2, 4])),
            ):
                tensor = numbers[world.rank].to(dtype)
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor.to(torch.int64), expected.to(dtype).to(torch.int64)), (dtype, op)
        with pytest.raises(CollectiveError, match="share one place in memory"):
            dist.all_reduce(torch.ones(1).expand(4))
        second = torch.ones(5)
        first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        first.then(lambda _: dist.all_reduce(second, async_op=True).get_future().wait()).wait()
        assert second.tolist() == [4] * 5

    run_ranks(4, body, init=False)


def test_what_has_not_come_from_another_host_is_named_once() -> None:
    """Rank 1 is late, then rank 2: each host's first waiting rank says so, and nobody else."""

    def body(world: World, settings: Settings) -> list[str]:
        on_hosts("aabb", settings, world)
        said = listen()
        dist.all_reduce(torch.ones(3))
        store = dist.distributed_c10d._get_default_store()
        for late, key in ((1, "first"), (2, "second")):
            if world.rank == late:
                store.wait([key], timedelta(seconds=10))
            elif world.rank == 3:
                timer = threading.Timer(0.9, lambda key=key: store.set(key, "1"))
                timer.start()
            dist.all_reduce(torch.ones(3))
            dist.barrier()
        return said

    told = run_ranks(4, body, init=False, stall_warning=0.3)
    assert [len(lines) for lines in told] == [2, 0, 1, 1], told
    what = "all_reduce SUM of 3 elements of float32, collective"
    # init() makes one call.
    assert told[0][0].startswith(f"Rank 0 waits in {what} 3 of its group: rank 1 has not come for 0")
    assert told[0][1].startswith(f"Rank 0 waits in {what} 5 of its group: of ranks 2, 3, on other hosts,")
    assert told[2][0].startswith(f"Rank 2 waits in {what} 3 of its group: of ranks 0, 1, on other hosts,")
    assert told[3][0].startswith(f"Rank 3 waits in {what} 5 of its group: rank 2 has not come for 0")

"""The engine over several hosts: network namespaces, joined by a pair of virtual cables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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

"""What is built on torch.distributed, on the shared-memory engine: DDP, FSDP2 and DTensor."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from tests.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hora.torch as hora
from hora.torch.engines import Group

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return layers.double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def reference(size: int) -> list[torch.Tensor]:
    """One rank with all batches."""
    alone = model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(alone(batch(step, rank)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in alone.parameters()]


def assert_trained(parameters: list[torch.Tensor]) -> None:
    for mine, expected in zip(parameters, reference(hora.size()), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def train(module: nn.Module) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, hora.rank())).square().mean().backward()
        optimizer.step()


@ranks(1, 2, 3, 4)
def test_ddp() -> None:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.004)  # several buckets
    train(wrapped)
    assert_trained([parameter.detach() for parameter in wrapped.parameters()])


@ranks(2, 3)
def test_fsdp2() -> None:
    sharded = model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    train(sharded)
    whole = []
    for parameter in sharded.parameters():
        assert isinstance(parameter, DTensor)
        whole.append(parameter.full_tensor().detach())
    assert_trained(whole)


@ranks(2, 4)
def test_dtensor() -> None:
    size, rank = hora.size(), hora.rank()
    mesh = init_device_mesh("cpu", (size,))
    assert isinstance(mesh.get_group(), Group)
    whole = torch.arange(24.0 * size).view(4 * size, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.to_local(), whole[4 * rank : 4 * rank + 4])
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    columns = rows.redistribute(mesh, [Shard(1)]) if size == 2 else None
    assert columns is None or torch.equal(columns.full_tensor(), whole)
    part = DTensor.from_local(torch.full((2 * size,), float(rank)), mesh, [Partial()])
    total = float(sum(range(size)))
    assert torch.equal(part.redistribute(mesh, [Replicate()]).to_local(), torch.full((2 * size,), total))
    assert torch.equal(part.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2,), total))


@ranks(2)
def test_tensor_parallel_layers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain, split = model(), model()
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = batch(0, 0)
    torch.testing.assert_close(split(inputs), plain(inputs), rtol=1e-12, atol=1e-12)


@ranks(2)
def test_the_old_zero_redundancy_optimizer() -> None:
    with warnings.catch_warnings():  # its module compiles with the deprecated torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(step, hora.rank())).square().mean().backward()
        optimizer.step()
    assert_trained([parameter.detach() for parameter in wrapped.parameters()])
    dist.barrier()

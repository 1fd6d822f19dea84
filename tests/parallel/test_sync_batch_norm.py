"""SyncBatchNorm against plain batch norm over the union batch."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError


def union(sizes: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64)
    return (x * 3 + 1000).to(dtype)  # a mean far from 0: sums of squares would cancel


@ranks(1, 2, 3)
def test_it_equals_batch_norm_of_the_union_batch() -> None:
    rank = hora.rank()
    for sizes in ([4, 4, 4], [5, 0, 1], [2, 1, 7]):
        sizes = sizes[: hora.size()]  # noqa: PLW2901
        for shape, plain in (
            ((3,), torch.nn.BatchNorm1d),
            ((3, 6), torch.nn.BatchNorm1d),
            ((3, 4, 5), torch.nn.BatchNorm2d),
        ):
            for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
                check(plain(3, dtype=torch.float64, **options), options, sizes, shape, rank)


def check(plain: torch.nn.Module, options: dict, sizes: list[int], shape: tuple[int, ...], rank: int) -> None:  # type: ignore[type-arg]
    torch.manual_seed(1)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    sync = hora.SyncBatchNorm(3, dtype=torch.float64, **options)
    sync.load_state_dict(plain.state_dict())
    everything = union(sizes, shape, torch.float64).requires_grad_()
    mine = torch.split(everything.detach(), sizes)[rank].clone().requires_grad_()
    for _ in range(2):
        expected = plain(everything)
        result = sync(mine)
        weights = torch.arange(expected.numel(), dtype=torch.float64).reshape(expected.shape).sin()
        (expected * weights).sum().backward()
        (result * torch.split(weights, sizes)[rank]).sum().backward()
    assert torch.allclose(result, torch.split(expected, sizes)[rank], rtol=1e-10, atol=1e-10)
    assert mine.grad is not None
    assert everything.grad is not None
    assert torch.allclose(mine.grad, torch.split(everything.grad, sizes)[rank], rtol=1e-8, atol=1e-10)
    for (name, own), (_, other) in zip(sync.named_parameters(), plain.named_parameters(), strict=True):
        assert own.grad is not None
        assert torch.allclose(hora.allreduce(own.grad, op=hora.Sum), other.grad, rtol=1e-9, atol=1e-9), name
    for (name, buffer), (_, other) in zip(sync.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-12), name
    plain.eval()
    sync.eval()
    if sizes[rank] and options.get("track_running_stats", True):  # without them eval uses the batch
        assert torch.allclose(sync(mine), plain(mine), rtol=1e-12)
    elif not options.get("track_running_stats", True):
        assert torch.allclose(sync(mine), torch.split(plain(everything), sizes)[rank], rtol=1e-9)


@ranks(2)
def test_half_precision_and_float32() -> None:
    rank = hora.rank()
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
        everything = (union([3, 2], (3, 4), torch.float64) - 1000).to(dtype)
        exact = torch.nn.BatchNorm1d(3, dtype=torch.float64)(everything.double())
        result = hora.SyncBatchNorm(3)(torch.split(everything, [3, 2])[rank])
        assert result.dtype == dtype
        assert torch.allclose(result.double(), torch.split(exact, [3, 2])[rank], rtol=bound, atol=bound)


@ranks(2)
def test_a_model_is_converted_with_its_parameters() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Sequential(torch.nn.BatchNorm2d(2))
    )
    names, parameters = list(model.state_dict()), list(model.parameters())
    changed = hora.SyncBatchNorm.convert_sync_batchnorm(model)
    assert changed is model
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [type(module).__name__ for module in model.modules()].count("SyncBatchNorm") == 2
    twin = copy.deepcopy(model)
    x = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(hora.rank()))
    assert torch.equal(model(x), twin(x))
    mean = hora.allgather(model[0](x)).mean((0, 2, 3))
    assert torch.allclose(model[1].running_mean, 0.1 * mean, atol=1e-6)


@ranks(2)
def test_wrong_inputs_are_told_on_every_rank() -> None:
    norm = hora.SyncBatchNorm(3)
    with pytest.raises(CollectiveError, match=r"SyncBatchNorm\(3\) got an input of shape \(2, 4\)"):
        norm(torch.ones(2, 4))
    with pytest.raises(CollectiveError, match="got 1 values per channel"):
        norm(torch.ones(1 - hora.rank(), 3))
    hora.barrier()

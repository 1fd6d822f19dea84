"""Tensors that are more, or less, than memory: the engine is right about each or refuses it, and lives on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks, run_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hora.torch as hora
from hora.core.errors import CollectiveError
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch.engines import _create
from hora.torch.engines._hosts import HostsGroup


def alive() -> None:
    """Every rank comes here; the group is as good as before."""
    tensor = torch.full((3,), float(hora.rank() + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, hora.size() + 1))] * 3


def every_call(one: torch.Tensor, make: Callable[[int], torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Every collective of ``torch.distributed``, of a tensor of four elements."""
    rank, size = hora.rank(), hora.size()
    parts, whole = [make(4) for _ in range(size)], make(4 * size)
    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "asynchronous": lambda: dist.all_reduce(one, async_op=True).wait(),
        "reduce": lambda: dist.reduce(one, 0),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(parts, one),
        "all_gather_single": lambda: dist.all_gather_single(whole, one),
        "gather": lambda: dist.gather(one, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one, parts if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(one, whole),
        "all_to_all": lambda: dist.all_to_all([make(4) for _ in range(size)], parts),
        "all_to_all_single": lambda: dist.all_to_all_single(make(4 * size), whole),
        "barrier": dist.barrier,
    }


# --- tensors that have no bytes ---------------------------------------------------------------------


def fake_calls() -> None:
    for inside in (True, False):  # a fake tensor stays fake where its mode is not in force
        mode = FakeTensorMode()
        with mode:
            one, makes = torch.ones(4), torch.ones
            calls = every_call(one, makes)
        for name, call in calls.items():
            if inside:
                with mode:
                    call()
            elif not name.startswith("all_to_all"):  # they make real outputs there
                call()
        assert isinstance(one, FakeTensor), one
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        dist.all_reduce(REAL)
    with FakeTensorMode(allow_non_fake_inputs=True):
        dist.all_reduce(REAL)
    assert REAL.tolist() == [1, 1]
    alive()


REAL = torch.ones(2)


@ranks(1, 2, 3)
def test_fake_tensors_move_no_bytes_as_on_gloo() -> None:
    fake_calls()
    if hora.rank() == 0:  # nobody else takes part, so nobody waits
        with FakeTensorMode():
            dist.all_reduce(torch.ones(3))
    alive()


def test_fake_tensors_on_several_hosts() -> None:
    def body(world: World, settings: Settings) -> None:
        _create._host = lambda: f"machine{world.rank // 2} host"
        hora.init(world, settings=settings)
        assert isinstance(dist.group.WORLD, HostsGroup)
        fake_calls()

    run_ranks(3, body, init=False)


@ranks(2)
def test_meta_tensors_as_on_gloo() -> None:
    for call in every_call(torch.ones(4, device="meta"), lambda n: torch.ones(n, device="meta")).values():
        call()
    with pytest.raises((CollectiveError, RuntimeError)):
        dist.all_gather([torch.ones(4, device="meta") for _ in range(2)], torch.ones(4))
    alive()


@ranks(2)
def test_a_model_is_laid_out_before_it_has_memory() -> None:
    """FSDP2 on a model of the meta device, traced with fake tensors first, then given memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    mesh = init_device_mesh("cpu", (hora.size(),))
    fully_shard(model, mesh=mesh)
    alive()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    loss = model(torch.ones(3, 4)).sum()
    assert loss.item() == 3 * 2 * (6 * 5 + 1)
    loss.backward()
    alive()


# --- what torch's compiler and its transformations wrap ----------------------------------------------


@ranks(2)
def test_a_trace_holds_the_collective() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y * 2

    for mode in ("real", "fake"):
        traced = make_fx(function, tracing_mode=mode)(torch.ones(3))
        assert "c10d.allreduce_" in traced.code
        alive()
    for backend in ("eager", "aot_eager"):
        assert torch.compile(function, backend=backend)(torch.ones(3)).tolist() == [4] * 3
        alive()


@ranks(2)
def test_transformations() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    assert torch.func.functionalize(function)(torch.ones(3)).tolist() == [2] * 3
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own decompositions
    value, tangent = torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))
    assert (value.tolist(), tangent.tolist()) == ([2] * 3, [1] * 3)
    assert torch.func.grad(lambda x: function(x).sum())(torch.ones(3)).tolist() == [1] * 3
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.func.vmap(function)(torch.ones(2, 3))
    alive()


# --- tensors of other kinds ---------------------------------------------------------------------------


def subclasses() -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.two_tensor import TwoTensor

    mesh = init_device_mesh("cpu", (hora.size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "DTensor": DTensor.from_local(torch.ones(4), mesh, [Shard(0)]),
            "two tensors": TwoTensor(torch.ones(4), torch.ones(4)),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            "compressed rows": torch.eye(4).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
            "mkldnn": torch.ones(4).to_mkldnn(),
        }


@ranks(2)
def test_other_kinds_are_right_or_refused() -> None:
    for kind, one in subclasses().items():
        for name, call in every_call(one, torch.ones).items():
            try:
                call()
            except (CollectiveError, RuntimeError, NotImplementedError, ValueError, TypeError):
                alive()  # refused on every rank alike
                continue
            alive()
            assert kind == "two tensors" or name in ("barrier", "all_to_all", "all_to_all_single"), (
                kind,
                name,
            )
    eye = torch.eye(3).to_sparse()
    dist.all_reduce(eye)
    assert torch.equal(eye.to_dense(), 2 * torch.eye(3))


class Marked(torch.Tensor):
    """A subclass without operations of its own."""


@ranks(2)
def test_plain_memory_in_every_disguise() -> None:
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    for tensor, expected in (
        (torch.ones(0), []),
        (torch.ones(2, 0), [[], []]),
        (torch.ones(()), 2),
        (torch.tensor([[1.0, 2], [3, 4]]).t(), [[2, 6], [4, 8]]),
        (torch.arange(8.0)[1::3], [2, 8, 14]),
        (complex_.clone().conj().imag, [-4, 2]),
        (torch.ones(2, requires_grad=True), [2, 2]),
        (torch.ones(2, requires_grad=True) * 3, [6, 6]),
        (torch.nn.Parameter(torch.ones(2)), [2, 2]),
        (torch.ones(2).as_subclass(Marked), [2, 2]),
    ):
        conjugate, negative = tensor.is_conj(), tensor.is_neg()
        dist.all_reduce(tensor)
        assert tensor.tolist() == expected
        assert (tensor.is_conj(), tensor.is_neg()) == (conjugate, negative)
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 1)):
        with pytest.raises(RuntimeError, match="unresolved conjugated tensors"):  # torch's own refusal
            call(complex_.conj())
        alive()
    group: Any = dist.group.WORLD
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    turned = (complex_ * (hora.rank() + 1)).conj()
    group.broadcast([turned], options).wait()  # as functional collectives call it
    assert turned.is_conj()
    assert turned.tolist() == [2 - 4j, 6 + 2j]
    whole = torch.zeros(8)
    dist.all_gather_single(whole, torch.ones(1).expand(4) * (hora.rank() + 1))
    assert whole.tolist() == [1] * 4 + [2] * 4
    received = torch.zeros(4)
    dist.all_to_all_single(received, torch.tensor(hora.rank() + 1.0).expand(4))
    assert received.tolist() == [1, 1, 2, 2]
    # single elements, of any stride
    gaps = torch.full((4,), hora.rank() + 1.0)
    dist.all_to_all([gaps[1::8], gaps[3::8]], [gaps[:1:2], gaps[:1:2]])
    assert gaps.tolist() == [hora.rank() + 1, 1, hora.rank() + 1, 2]
    with pytest.raises(CollectiveError, match="share one place in memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    alive()


@ranks(2)
def test_memory_that_was_given_back_is_refused() -> None:
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        with pytest.raises((CollectiveError, RuntimeError)):
            call(tensor)
        alive()


@ranks(2)
def test_dtypes_that_torch_cannot_add_are_refused() -> None:
    for dtype in (torch.bits8, torch.float4_e2m1fn_x2, torch.uint4, torch.int4, torch.float8_e8m0fnu):
        try:
            tensor = torch.empty(4, dtype=dtype)
        except RuntimeError:
            continue
        with pytest.raises(CollectiveError, match="is not defined"):
            dist.all_reduce(tensor)
        alive()
    moved = torch.full((4,), hora.rank(), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    dist.broadcast(moved, 1)
    assert moved.view(torch.uint8).tolist() == [1] * 4

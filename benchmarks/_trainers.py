"""One way to train per contender, each as its own documentation writes it."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hora.torch as hora
from _jobs import Place
from _models import Model
from hora.core.world import World

ALONE, APART = "one worker", "apart"
"""Contenders that do not average."""

LOSS_TOLERANCE = 1e-4
"""Relative. Other orders of summing differ by some 1e-7, and missing averages by 1e-3 and more."""


class Training:
    """A model in training on one rank.

    Args:
        module: what is called, wrapped as the contender wants it.
        optimizer: likewise.
        backward: takes the loss.
    """

    def __init__(
        self,
        spec: Model,
        place: Place,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        self._spec = spec
        self._module = module
        self.optimizer = optimizer
        self._backward = backward
        self._batch = spec.batch(torch.Generator().manual_seed(place.rank))

    def step(self) -> Tensor:
        """One training step on this rank's micro-batch, always the same one; returns the loss."""
        self.optimizer.zero_grad()
        loss = self._spec.loss(self._module, self._batch)
        self._backward(loss)
        self.optimizer.step()
        return loss.detach()

    def optimizer_bytes(self) -> int:
        """What the optimizer's state takes on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer keeps one inside
        return sum(_local_bytes(value) for state in inner.state.values() for value in state.values())


Trainer = Callable[[Model, Place], Training]


def one_worker(spec: Model, place: Place) -> Training:
    """Training without communication, on any number of ranks."""
    module = _model(spec)
    return Training(spec, place, module, _optimizer(spec, module.parameters()))


def with_hora(spec: Model, place: Place, **arguments: Any) -> Training:
    os.environ["HORA_STORE"] = place.store
    hora.init(World(rank=place.rank, size=place.size, local_rank=place.rank, local_size=place.size))
    module = _model(spec)
    plain = _optimizer(spec, module.parameters())
    optimizer = hora.DistributedOptimizer(plain, module, **arguments)
    hora.broadcast_parameters(module)
    return Training(spec, place, module, optimizer)


def with_sharded_hora(spec: Model, place: Place) -> Training:
    return with_hora(spec, place, shard="optimizer")


def with_ddp(spec: Model, place: Place, **arguments: Any) -> Training:
    _gloo(place)
    module = _model(spec)
    optimizer = _optimizer(spec, module.parameters())
    return Training(spec, place, nn.parallel.DistributedDataParallel(module, **arguments), optimizer)


def with_ddp_views(spec: Model, place: Place) -> Training:
    return with_ddp(spec, place, gradient_as_bucket_view=True)


def with_zero(spec: Model, place: Place) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _gloo(place)
    module = nn.parallel.DistributedDataParallel(_model(spec))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), spec.optimizer, **spec.arguments)
    return Training(spec, place, module, optimizer)


def with_fsdp2(spec: Model, place: Place) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _gloo(place)
    module = _model(spec)
    mesh = init_device_mesh("cpu", (place.size,))
    for layer in list(module.modules()):
        if isinstance(layer, spec.blocks):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    # Of the fused optimizers, sharded parameters take only Adam's.
    other = {"fused": False, "foreach": True} if spec.optimizer is torch.optim.SGD else {}
    return Training(spec, place, module, _optimizer(spec, module.parameters(), **other))


def with_accelerate(spec: Model, place: Place) -> Training:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module = _model(spec)
    module, optimizer = accelerator.prepare(module, _optimizer(spec, module.parameters()))
    _require_gloo(place)
    return Training(spec, place, module, optimizer, accelerator.backward)


def with_fabric(spec: Model, place: Place) -> Training:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    # With LOCAL_RANK set it starts no processes of its own.
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=LightningEnvironment())
    fabric = Fabric(accelerator="cpu", devices=place.size, strategy=strategy)
    fabric.launch()
    module = _model(spec)
    module, optimizer = fabric.setup(module, _optimizer(spec, module.parameters()))
    _require_gloo(place)
    return Training(spec, place, module, optimizer, fabric.backward)


def with_horovod(spec: Model, place: Place) -> Training:
    import horovod.torch as hvd

    hvd.init()
    module = _model(spec)
    plain = _optimizer(spec, module.parameters())
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=module.named_parameters())
    return Training(spec, place, module, optimizer)


TRAINERS: dict[str, Trainer] = {
    ALONE: one_worker,
    APART: one_worker,
    "Hora": with_hora,
    "Hora, sharded": with_sharded_hora,
    "DDP": with_ddp,
    "DDP, views": with_ddp_views,
    "DDP + ZeRO": with_zero,
    "FSDP2": with_fsdp2,
    "Accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Horovod": with_horovod,
}


def missing(name: str) -> str | None:
    """Why a contender cannot take part here; None if it can."""
    if name == "Hora, sharded" and "shard" not in inspect.signature(hora.DistributedOptimizer).parameters:
        return 'this version of Hora has no DistributedOptimizer(..., shard="optimizer")'
    if name == "Horovod" and find_spec("horovod") is None:
        return "not installed: its last release, of 2023, is source in C++14, and this PyTorch needs C++17"
    packages = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}
    if name in packages and find_spec(packages[name]) is None:
        return f"{packages[name]} is not installed; write: pip install 'hora[bench]'"
    return None


def different(losses: dict[str, float]) -> dict[str, str]:
    """Contenders whose loss is not DDP's, and what it is; those that do not average may have any."""
    return {
        name: f"its loss is {loss:.6f}, that of DDP {losses['DDP']:.6f}"
        for name, loss in losses.items()
        if name not in (ALONE, APART) and "DDP" in losses
        if not math.isclose(loss, losses["DDP"], rel_tol=LOSS_TOLERANCE)
    }


def peak_memory() -> int:
    """The most bytes that this process ever had in memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmHWM in /proc/self/status")


def engine() -> str:
    """What moves the bytes of CPU tensors in this process."""
    if not dist.is_initialized():
        return "none"
    return dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))["cpu"]


def _model(spec: Model) -> nn.Module:
    torch.manual_seed(1)
    return spec.make()


def _optimizer(spec: Model, parameters: Iterable[nn.Parameter], **other: Any) -> torch.optim.Optimizer:
    make: Any = spec.optimizer
    made: torch.optim.Optimizer = make(parameters, **(spec.arguments | other))
    return made


def _gloo(place: Place) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank, world_size=place.size)


def _require_gloo(place: Place) -> None:
    if (dist.get_world_size(), engine()) != (place.size, "gloo"):
        raise AssertionError(f"it trains with {dist.get_world_size()} ranks on {engine()}")


def _local_bytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()

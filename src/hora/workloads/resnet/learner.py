"""Model, optimizer and numerics of a worker: what one step and one evaluation do."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hora.torch as hora
from hora.torch.optim import LARS, decay_groups, set_lr
from hora.workloads.resnet.config import OptimizerConfig, Precision, Profile
from hora.workloads.resnet.data import Batch, Images
from hora.workloads.resnet.model import ResNet

__all__ = ["Learner", "compute_dtype"]


class Learner:
    """The model on this worker's device, with its optimizer. All ranks start with the same weights.

    Args:
        profile: what to train; its seed gives the weights.
        distributed: average gradients over the ranks. Without it the learner never calls a collective,
            except in :meth:`evaluate`.
    """

    def __init__(self, profile: Profile, *, distributed: bool = True) -> None:
        self.profile = profile
        self.device = hora.device()
        self.dtype = compute_dtype(profile.precision, self.device)
        self.stored = torch.float64 if self.dtype == torch.float64 else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(profile.seed)
            model = ResNet(profile.model)
        model.to(device=self.device, dtype=self.stored)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._adopt(model, distributed=distributed)

    def scratch(self, *, distributed: bool) -> Learner:
        """A copy with an optimizer of its own: training it leaves this learner as it is."""
        other = copy.copy(self)
        other._adopt(copy.deepcopy(self.model), distributed=distributed)
        return other

    def step(self, images: Tensor, labels: Tensor, *, lr: float) -> Tensor:
        """One training step on this worker's micro-batch; returns its mean loss, detached."""
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.model(images)
        loss = F.cross_entropy(logits.to(self.stored), labels, label_smoothing=self.profile.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def predict(self, images: Tensor) -> Tensor:
        """Logits [n, classes], by the running statistics of the normalizations."""
        self.model.eval()
        with torch.no_grad(), self.autocast():
            logits: Tensor = self.model(images).to(self.stored)
        self.model.train()
        return logits

    def evaluate(self, images: Images, loader: Iterable[tuple[Tensor]]) -> tuple[float, float]:
        """Mean loss (without smoothing) and top-1 accuracy over the samples of all ranks' loaders."""
        self._agree_on_statistics()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for (samples,) in loader:
            if len(samples):
                inputs, labels = self.put(images.batch(samples.tolist()))
                logits = self.predict(inputs)
                loss += F.cross_entropy(logits, labels, reduction="sum").double()
                right += (logits.argmax(dim=1) == labels).sum()
                count += len(samples)
        each = max(1, count)
        means = hora.mean({"loss": loss / each, "accuracy": right / each}, weight=count)
        return means["loss"], means["accuracy"]

    def put(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images as [n, channels, height, width], channels last in memory, and labels, on the device."""
        images, labels = (torch.from_numpy(part).to(self.device, non_blocking=True) for part in batch)
        return images.to(self.stored).permute(0, 3, 1, 2), labels

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model computes in its compute type."""
        if self.dtype == self.stored:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def random_batch(self, samples: int, *, side: int) -> tuple[Tensor, Tensor]:
        """Noise of a batch's form, to measure speed with. Global random streams stay as they are."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(samples, side, side, self.profile.model.channels, generator=generator)
        labels = torch.randint(self.profile.model.classes, (samples,), generator=generator)
        return images.to(self.device, self.stored).permute(0, 3, 1, 2), labels.to(self.device)

    def _adopt(self, model: ResNet, *, distributed: bool) -> None:
        self.model = model
        optimizer = make_optimizer(self.profile.optimizer, model)
        self.optimizer: torch.optim.Optimizer = optimizer
        if distributed:
            self.optimizer = hora.DistributedOptimizer(optimizer, model)

    def _agree_on_statistics(self) -> None:
        # Each worker's running statistics come from its own micro-batches. Their mean is the better
        # estimate, and makes all ranks evaluate one and the same model.
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if hora.size() == 1 or not buffers:
            return
        flat = hora.allreduce(torch.cat([buffer.flatten() for buffer in buffers]), name="running statistics")
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def make_optimizer(config: OptimizerConfig, model: ResNet) -> torch.optim.Optimizer:
    """SGD or LARS, without weight decay on normalizations and biases."""
    groups = decay_groups(model, weight_decay=config.weight_decay)
    if config.name == "lars":
        return LARS(groups, config.lr, momentum=config.momentum, eta=config.eta, epsilon=config.epsilon)
    for group in groups:
        del group["trust"]
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The type in which convolutions are computed. ``auto`` is bfloat16 where the hardware multiplies it."""
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if native else torch.float32

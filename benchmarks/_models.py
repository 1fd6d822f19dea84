"""The models that training steps are compared on, each with its data and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.resnet.config import SMALL
from hora.workloads.resnet.model import ResNet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained.

    Attributes:
        make: the model; the seed is set before.
        batch: one rank's micro-batch of a generator's random numbers.
        blocks: types of the layers that FSDP2 shards one by one; none: the whole model at once.
        optimizer: fused, which is the fastest that PyTorch has for the CPU. Its rate is so high that a few
            steps without averaging would show in the loss.
        steps: steps in a burst, so that bursts of all models take about as long.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: type[torch.optim.Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[type[nn.Module], ...] = ()
    steps: int = 2

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


class LanguageModel(nn.Module):
    """A causal transformer: 27 M parameters with the default arguments."""

    def __init__(
        self, *, vocabulary: int = 8000, width: int = 512, layers: int = 6, tokens: int = 32
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens))

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.words(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class Embeddings(nn.Module):
    """A click model: most parameters are in tables of which a step reads a few rows. Gradients are dense."""

    def __init__(self, *, tables: int = 8, rows: int = 50_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, features: Tensor) -> Tensor:
        found = [table(features[:, column]) for column, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat(found, dim=1))
        return logits


def mlp(*, width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def images(count: int, generator: torch.Generator) -> Batch:
    pixels = torch.randn(count, 1, 28, 28, generator=generator)
    return pixels, torch.randint(10, (count,), generator=generator)


def text(vocabulary: int, tokens: int, count: int, generator: torch.Generator) -> Batch:
    words = torch.randint(vocabulary, (count, tokens + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def clicks(tables: int, rows: int, count: int, generator: torch.Generator) -> Batch:
    features = torch.randint(rows, (count, tables), generator=generator)
    return features, torch.randint(2, (count,), generator=generator)


def noise(width: int, generator: torch.Generator) -> Batch:
    return torch.randn(8, width, generator=generator), torch.randint(width, (8,), generator=generator)


MODELS = {
    "resnet": Model(
        make=lambda: ResNet(SMALL),
        batch=lambda generator: images(64, generator),
        optimizer=torch.optim.SGD,
        arguments={"lr": 1e-2, "momentum": 0.9, "fused": True},
        steps=4,
    ),
    "transformer": Model(
        make=LanguageModel,
        batch=lambda generator: text(8000, 32, 4, generator),
        optimizer=torch.optim.Adam,
        arguments={"lr": 1e-4, "fused": True},
        blocks=(nn.TransformerEncoderLayer,),
    ),
    "embedding": Model(
        make=Embeddings,
        batch=lambda generator: clicks(8, 50_000, 256, generator),
        optimizer=torch.optim.Adam,
        arguments={"lr": 1e-3, "fused": True},
        blocks=(nn.Embedding,),
    ),
    "many tensors": Model(
        make=lambda: mlp(width=40, depth=80),
        batch=lambda generator: noise(40, generator),
        optimizer=torch.optim.SGD,
        arguments={"lr": 0.1, "momentum": 0.9, "fused": True},
        steps=20,
    ),
    "tiny": Model(
        make=lambda: mlp(width=16, depth=2),
        batch=lambda generator: noise(16, generator),
        optimizer=torch.optim.SGD,
        arguments={"lr": 0.1, "fused": True},
    ),
}
"""By name. ``tiny`` is for tests of the benchmarks."""

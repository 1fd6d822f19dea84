"""Random numbers that belong to the sample and the step, not to the rank: what ``hora verify`` tries."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hora.torch._fetch import _Seeded

__all__ = [
    "DRAWS",
    "DROPOUTS",
    "States",
    "drops",
    "keyed_rows",
    "keyed_samples",
    "seed_of",
    "without_dropout",
]

DROPOUTS: frozenset[Any] = frozenset(
    getattr(torch.nn.functional, name)
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
    )
) | {torch.dropout, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.alpha_dropout}
"""Functions that drop something at random."""


def without_dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of :data:`DROPOUTS` so that it drops nothing."""
    name = function.__name__
    if name == "scaled_dot_product_attention":
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return function(*args, **(kwargs | {"dropout_p": 0.0} if len(args) <= 4 else kwargs))
    if name == "multi_head_attention_forward":  # training=True means nothing but dropout there
        return function(*args, **(kwargs | {"training": False}))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # the one float among the arguments
        return function(*(0.0 if isinstance(value, float) else value for value in args), **kwargs)
    return args[0] if args else kwargs["input"]


def drops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of one of :data:`DROPOUTS` drops anything."""
    name = function.__name__
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("training", True)) and any(
            isinstance(value, float) and value for value in args
        )
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return any(isinstance(value, float) and value for value in args)
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(probability and training)


def _normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    return lambda row: row.normal_()


def _uniform(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    return lambda row: row.uniform_()


def _in_place(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Callable[[torch.Tensor], Any]]:
    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
        plain = {key: value for key, value in kwargs.items() if key != "generator"}
        return lambda row: getattr(row, name)(*args[1:], **plain)

    return make


DRAWS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Callable[[torch.Tensor], Any]]] = {
    torch.randn: _normal,
    torch.randn_like: _normal,
    torch.rand: _uniform,
    torch.rand_like: _uniform,
    torch.Tensor.normal_: _in_place("normal_"),
    torch.Tensor.uniform_: _in_place("uniform_"),
    torch.Tensor.bernoulli_: _in_place("bernoulli_"),
    torch.Tensor.exponential_: _in_place("exponential_"),
    torch.Tensor.random_: _in_place("random_"),
}
"""Functions that draw elements independently, and how a row of their result is drawn alone."""


def seed_of(*parts: object) -> int:
    """A seed of 63 bits for what these parts name."""
    text = "\n".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def keyed_rows(
    result: torch.Tensor, keys: Sequence[str], draw: Callable[[torch.Tensor], Any], *, turn: object
) -> None:
    """Draw each row of ``result`` anew, under a seed of its sample's own."""
    before = torch.get_rng_state()
    with torch.no_grad():
        for row, key in zip(result, keys, strict=True):
            torch.default_generator.manual_seed(seed_of(key, turn))
            drawn = torch.empty(row.shape, dtype=row.dtype)
            draw(drawn)
            row.copy_(drawn)
    torch.set_rng_state(before)


class States:
    """The global random generators, set aside while others are in force."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any, torch.Tensor] | None = None

    def put_aside(self, seed: int) -> None:
        """Seed all generators; what they would have given comes after :meth:`restore`."""
        if self._states is None:
            self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)

    def restore(self) -> None:
        """Go on where the generators were."""
        if self._states is not None:
            python, numpy, of_torch = self._states
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(of_torch)
            self._states = None


def keyed_samples(fetch: Any) -> None:
    """Let torch's loaders, their processes included, draw each sample under a seed of its own."""
    original = fetch._MapDatasetFetcher.fetch

    def fetched(fetcher: Any, index: Any) -> Any:
        # Hora's loader seeds its samples by their place already.
        if not fetcher.auto_collation or isinstance(fetcher.dataset, _Seeded):
            return original(fetcher, index)
        states = States()
        samples = []
        for sample in index:
            states.put_aside(seed_of("sample", sample))
            samples.append(fetcher.dataset[sample])
        states.restore()
        return fetcher.collate_fn(samples)

    fetch._MapDatasetFetcher.fetch = fetched

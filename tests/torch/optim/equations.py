"""The steps of the papers in NumPy and float64, written from their equations: no code is shared with Hora."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Step = Callable[[Array, Array, dict[str, Any]], Array]
"""Takes a tensor's values, its gradient, and a dictionary of what it remembers; returns the new values."""


def size(values: Array) -> float:
    return float(np.sqrt(np.sum(np.square(values))))


def lars(*, lr: float, momentum: float, decay: float, eta: float, inside: bool, trust: bool = True) -> Step:
    """arXiv:1708.03888, algorithm 1; outside: as SGD with momentum, at the rate lr * trust."""

    def step(w: Array, g: Array, memory: dict[str, Any]) -> Array:
        rate = 1.0
        if trust and size(w) > 0 and size(g) > 0:
            rate = eta * size(w) / (size(g) + decay * size(w))
        v = memory.get("v", np.zeros_like(w))
        if inside:
            memory["v"] = momentum * v + lr * rate * (g + decay * w)
            return w - memory["v"]
        memory["v"] = momentum * v + (g + decay * w)
        return w - lr * rate * memory["v"]

    return step


def lamb(
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    correct: bool = True,
    bounds: tuple[float, float] | None = None,
    trust: bool = True,
) -> Step:
    """arXiv:1904.00962, algorithm 2."""
    b1, b2 = betas

    def step(w: Array, g: Array, memory: dict[str, Any]) -> Array:
        t = memory["t"] = memory.get("t", 0) + 1
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
        m_hat = memory["m"] / (1 - b1**t) if correct else memory["m"]
        v_hat = memory["v"] / (1 - b2**t) if correct else memory["v"]
        u = m_hat / (np.sqrt(v_hat) + epsilon) + decay * w
        phi = size(w) if bounds is None else min(max(size(w), bounds[0]), bounds[1])
        ratio = phi / size(u) if trust and size(w) > 0 and size(u) > 0 else 1.0
        return w - lr * ratio * u

    return step


def novograd(
    *, lr: float, betas: tuple[float, float], epsilon: float, decay: float, averaging: bool = False
) -> Step:
    """arXiv:1905.11286, algorithm 1."""
    b1, b2 = betas

    def step(w: Array, g: Array, memory: dict[str, Any]) -> Array:
        squared = float(np.vdot(g, g))
        memory["v"] = b2 * memory["v"] + (1 - b2) * squared if "v" in memory else squared
        added = g / (np.sqrt(memory["v"]) + epsilon) + decay * w
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1 if averaging else 1.0) * added
        return w - lr * memory["m"]

    return step


def follow(step: Step, start: Array, gradients: list[Array]) -> Array:
    """The values after all steps."""
    values, memory = start.copy(), dict[str, Any]()
    for gradient in gradients:
        values = step(values, gradient, memory)
    return values

"""The records by which every adapter reports a training, each of one form, for :mod:`hora.guard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["fed", "final", "not_finite", "replica", "snapshot"]

Record = dict[str, Any]


def replica(
    *,
    key: str,
    members: Sequence[int],
    names: Sequence[str],
    optimizer: str,
    where: str | None,
    parameters: Sequence[int],
    state: Sequence[int] = (),
    rates: Sequence[Any] = (),
    distributed: bool = True,
    broadcast: bool = False,
    changed: Sequence[int] = (),
    seed: int | None = None,
    restored: Sequence[Any] = (),
    together: str | None = None,
    stateful: bool = False,
) -> Record:
    """Before a training's first step.

    Args:
        key: of the training.
        members: the ranks that take part.
        names: of the parameters.
        optimizer: its class.
        where: the line that made it.
        parameters: their fingerprints.
        state: those of the optimizer's state.
        rates: hyper-parameters.
        distributed: whether Hora averages the gradients.
        broadcast: whether all parameters were broadcast.
        changed: numbers of those that have changed since.
        seed: the generator's.
        restored: loaded states.
        together: what shows that ranks which step by their own gradients work on one training.
        stateful: whether the optimizer has a state already.
    """
    return {
        "kind": "replica",
        "key": key,
        "members": list(members),
        "distributed": distributed,
        "broadcast": broadcast,
        "changed": list(changed),
        "seed": seed,
        "restored": list(restored),
        "names": list(names),
        "optimizer": optimizer,
        "where": where,
        "together": together,
        "stateful": stateful,
        "parameters": list(parameters),
        "state": list(state),
        "rates": list(rates),
    }


def snapshot(
    *,
    key: str,
    step: int,
    parameters: Sequence[int],
    gradients: Sequence[int] = (),
    state: Sequence[int] = (),
    rates: Sequence[Any] = (),
    written: Sequence[Any] = (),
    restored: Sequence[Any] = (),
    steered: Sequence[Any] = (),
    buffers: str | None = None,
) -> Record:
    """After some steps: fingerprints, and what has happened since the last."""
    return {
        "kind": "print",
        "key": key,
        "step": step,
        "parameters": list(parameters),
        "gradients": list(gradients),
        "state": list(state),
        "rates": list(rates),
        "written": list(written),
        "restored": list(restored),
        "steered": list(steered),
        "buffers": buffers,
    }


def final(*, key: str, step: int, parameters: Sequence[int], buffers: Mapping[str, int]) -> Record:
    """At the end: fingerprints of the parameters, and of buffers by their names."""
    return {
        "kind": "final",
        "key": key,
        "step": step,
        "parameters": list(parameters),
        "buffers": dict(buffers),
    }


def fed(
    *,
    key: str,
    members: Sequence[int],
    step: int,
    where: str | None,
    local: str | None,
    inputs: str | None,
    noise: str | None = None,
    states: str | None = None,
    fetched: Mapping[str, str] | None = None,
    generator: str | None = None,
) -> Record:
    """Of one of the first steps: words for what the model was fed, and for what was drawn.

    Args:
        key: of the training.
        members: the ranks that take part.
        step: which.
        where: the line that made it.
        local: for this rank's own gradients; None: nobody sees them.
        inputs: for the samples; None: likewise.
        noise: for random tensors that were drawn.
        states: for the states of the generators that the model drew from.
        fetched: for those that loading drew from, by their kind.
        generator: whose the model's are, if not the framework's global one.
    """
    return {
        "kind": "fed",
        "key": key,
        "members": list(members),
        "step": step,
        "where": where,
        "local": local,
        "inputs": inputs,
        "noise": noise,
        "states": states,
        "fetched": dict(fetched or {}),
        "generator": generator,
    }


def not_finite(
    *, key: str, members: Sequence[int], own: bool, step: int, where: str | None, bad: Mapping[str, Any]
) -> Record:
    """A step was made with what is not finite.

    Args:
        key: of the training.
        members: the ranks whose gradients are averaged.
        own: whether they are this rank's own, not yet averaged.
        step: which.
        where: the line that computed them, if ``bad`` does not say.
        bad: ``names`` of up to five parameters, the ``count`` of all, the ``value`` of the first, that of the
            ``loss``, the ``order`` of the backward pass; and what else of these overrides the others.
    """
    return {
        "kind": "not-finite",
        "key": key,
        "members": list(members),
        "own": own,
        "step": step,
        **bad,
        "where": bad.get("where") or where,
    }

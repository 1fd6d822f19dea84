"""Variables of a model and its optimizer, made equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hora.core.errors import CollectiveError
from hora.keras._backend import api, engine

__all__ = ["broadcast_global_variables", "broadcast_variables", "variables_of"]

CHUNK = 64 * 2**20
"""Bytes sent at a time: large enough for the engine, small against a model."""


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, *, process_set: Any = None) -> None:
    """Give all ranks the values that variables have on one.

    Args:
        variables: Keras variables, the same on every rank but for their values: any dtype and shape.
        root_rank: whose values all ranks get; counted in the whole job, with a process set too.
        process_set: the ranks that take part; all by default.

    Raises:
        CollectiveError: on every rank, when their shapes or dtypes differ.
    """
    members = api.global_process_set if process_set is None else process_set
    chosen = list({id(variable): variable for variable in variables}.values())
    if not chosen or api.size() == 1 or members.size() == 1:
        return
    _agree(chosen, members)
    mine = api.rank() == root_rank
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in chosen]
    # Whole numbers of four bytes travel on every engine, whatever the dtypes are.
    data = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
    words = np.zeros(-(-data.size // 4), np.int32)
    words.view(np.uint8)[: data.size] = data
    for start in range(0, words.size, CHUNK // 4):
        part = engine.native(words[start : start + CHUNK // 4])
        sent = api.broadcast(part, root_rank=root_rank, name="variables", process_set=members)
        words[start : start + CHUNK // 4] = keras.ops.convert_to_numpy(sent)
    if mine:
        return
    received, place = words.view(np.uint8), 0
    for variable, array in zip(chosen, arrays, strict=True):
        piece = received[place : place + array.nbytes]
        variable.assign(np.frombuffer(piece.tobytes(), array.dtype).reshape(array.shape))
        place += array.nbytes


def broadcast_global_variables(
    root_rank: int = 0, *, model: Any, local_variables: Sequence[Any] = ()
) -> None:
    """Give all ranks the model of one: its weights, the statistics of its layers, its optimizer's state.

    States of random generators are left as they are: each rank draws noise of its own.

    Args:
        root_rank: whose values all ranks get.
        model: a model that is built, and compiled if the optimizer's state is to go along.
        local_variables: which stay as they are on each rank.

    Raises:
        CollectiveError: on every rank, when the models or optimizers differ in shapes or dtypes.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    kept = {id(variable) for variable in local_variables}
    broadcast_variables([each for each in variables_of(model) if id(each) not in kept], root_rank)


def variables_of(model: Any, optimizer: Any = None) -> list[Any]:
    """What a model's training consists of: its variables and its optimizer's, without random generators."""
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    found = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return [variable for variable in found if "seed_generator_state" not in variable.path]


def _agree(variables: list[Any], members: Any) -> None:
    forms = [f"{tuple(variable.shape)} {variable.dtype}" for variable in variables]
    mark = hashlib.sha256(json.dumps(forms).encode()).hexdigest()
    marks = api.allgather_object(mark, process_set=members)
    if len(set(marks)) == 1:
        return
    everyone = api.allgather_object(forms, process_set=members)
    ranks = members.ranks or list(range(api.size()))
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs != everyone[0]:
            place = next(
                (
                    index
                    for index, pair in enumerate(zip(theirs, everyone[0], strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(theirs), len(everyone[0])),
            )
            here, there = (
                f"{rows[place]}" if place < len(rows) else "missing" for rows in (everyone[0], theirs)
            )
            raise CollectiveError(
                f"The variables of the ranks differ: number {place} of rank {ranks[0]} is {here}, that of "
                f"rank {rank} is {there} ({len(everyone[0])} and {len(theirs)} in all).",
                fix="Make the same model on every rank; values may differ, shapes and dtypes not.",
            )

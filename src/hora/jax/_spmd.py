"""``spmd``: one program on all ranks, each with its share of the batch; and steps that the guard sees."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from hora.core.errors import UsageError
from hora.jax import _watcher
from hora.jax._context import Context, required
from hora.jax._mesh import AXIS, Places
from hora.jax._notes import Notes, collecting

__all__ = ["spmd", "watched"]

Result = Literal["same", "split"]
_SPECS = {"same": PartitionSpec(), "split": PartitionSpec(AXIS)}


def spmd(
    function: Callable[..., Any] | None = None,
    *,
    split: int | str | Sequence[int | str],
    results: Result | Sequence[Result] = "same",
    donate: int | Sequence[int] = (),
) -> Any:
    """Compile a step that runs on all ranks together, each on its share of the batch.

    It is ``jax.jit(jax.shard_map(function, mesh=hora.mesh(), ...))`` with the arrays put in place: arguments
    in ``split`` are this rank's rows (as ``data_loader`` gives them), all others are the same on every rank.
    Inside, arrays are this rank's, gradients too, until ``hora.allreduce`` or ``DistributedOptimizer``
    combines them. Calls are reported to the guard, which compares shapes and dtypes of the ranks before the
    first.

    Args:
        function: the step: pytrees of arrays in, pytrees of arrays out.
        split: places or names of the arguments of which each rank has a share, with equal numbers of rows.
        results: ``"same"``: results are the same on every rank, as they are after a reduction. ``"split"``:
            they are each rank's own rows. A tuple says it for each element of a tuple that the function
            returns.
        donate: places of arguments whose memory may be used for the results, such as parameters and state.

    Returns:
        The compiled step; without ``function``, a decorator. Results are global arrays: ``float(loss)``
        works, and ``hora.local(result)`` gives this rank's part.

    Raises:
        UsageError: ``split`` or ``results`` cannot be meant.
    """
    if function is None:
        return functools.partial(spmd, split=split, results=results, donate=donate)
    return _Step(function, split=split, results=results, donate=donate)


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the guard see the calls of a compiled step: ``step = hora.watched(jax.jit(step))``.

    What runs inside a compiled program is invisible to Python. A watched step tells the supervisor when it
    starts and when its results are there, so that ranks which wait for each other are seen, and compares the
    arguments' shapes and dtypes over the ranks the first time. ``hora.spmd`` does so by itself.

    Args:
        function: a compiled step over global arrays: ``jax.jit``, or ``jax.jit`` of ``jax.shard_map``.

    Returns:
        A function with the same arguments and results.
    """
    name = getattr(function, "__name__", "step")
    prepare = _compiles(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        context = required("watched")
        if context.world.size == 1:
            return function(*args, **kwargs)
        shapes = [
            (leaf.dtype, leaf.shape) for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype")
        ]
        return _watcher.run(
            context,
            name,
            shapes,
            lambda: (function(*args, **kwargs), None),
            owner=call,
            arguments=(args, kwargs),
            prepare=None if prepare is None else lambda: prepare(*args, **kwargs),
        )

    return call


class _Step:
    """A function that runs on all ranks together."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        split: int | str | Sequence[int | str],
        results: Result | Sequence[Result],
        donate: int | Sequence[int],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", "step")
        self._names = _names(function)
        given = [split] if isinstance(split, int | str) else list(split)
        self._split = frozenset(self._place(each) for each in given)
        kinds = [results] if isinstance(results, str) else list(results)
        if any(kind not in _SPECS for kind in kinds):
            raise UsageError(
                f"results={results!r} is not known.", fix='Write "same", "split", or a tuple of these.'
            )
        self._out = _SPECS[results] if isinstance(results, str) else tuple(_SPECS[kind] for kind in results)
        self._donate = (donate,) if isinstance(donate, int) else tuple(donate)
        self._programs: dict[Any, tuple[Any, Notes | None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = required("spmd")
        program, notes, placed, shapes = self._placed(context, args, kwargs)
        if context.world.size == 1:
            return program(*placed)
        return _watcher.run(
            context,
            self._name,
            shapes,
            (lambda: (program(*placed), None)) if notes is None else (lambda: program(*placed)),
            owner=self,
            notes=notes,
            arguments=placed,
            prepare=lambda: program.lower(*placed).compile(),
        )

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function of ``jax.jit``: the program for such arguments, not compiled."""
        program, _, placed, _ = self._placed(required("spmd"), args, kwargs)
        return program.lower(*placed)

    def _placed(
        self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Notes | None, list[Any], list[Any]]:
        """The program, what it notes, its arguments on the mesh; dtypes and shapes of what this rank gave."""
        places = context.everywhere
        if kwargs:
            args = self._ordered(args, kwargs)
        key = (places, len(args))
        known = self._programs.get(key)
        if known is None:
            watched = context.watcher is not None
            known = self._programs[key] = self._program(places, len(args), watched=watched)
        program, notes = known
        shapes: list[Any] = []
        placed = []
        for index, argument in enumerate(args):
            is_split = index in self._split
            put = places.share if is_split else places.whole
            leaves, tree = jax.tree.flatten(argument)
            arrays = [put(leaf) for leaf in leaves]
            parts = places.size if is_split else 1
            shapes += [
                (array.dtype, (*[n // parts for n in array.shape[:1]], *array.shape[1:])) for array in arrays
            ]
            placed.append(jax.tree.unflatten(tree, arrays))
        return program, notes, placed, shapes

    def _program(self, places: Places, count: int, *, watched: bool) -> tuple[Any, Notes | None]:
        wrong = [place for place in self._split if place >= count]
        if wrong:
            raise UsageError(
                f"{self._name} got {count} arguments, but split= names number {wrong[0]} (from 0).",
                fix="Count from 0, or give the arguments' names.",
            )
        specs = tuple(_SPECS["split" if index in self._split else "same"] for index in range(count))
        notes = Notes() if watched else None
        function = self._function if notes is None else _noting(self._function, notes)
        mapped = jax.shard_map(
            function,
            mesh=places.mesh,
            in_specs=specs,
            out_specs=self._out if notes is None else (self._out, PartitionSpec(AXIS)),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=self._donate), notes

    def _place(self, given: int | str) -> int:
        if isinstance(given, int):
            return given
        if given not in self._names:
            raise UsageError(
                f"split={given!r} is no argument of {self._name}({', '.join(self._names)}).",
                fix="Name the argument that holds this rank's share of the batch.",
            )
        return self._names.index(given)

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        bound = inspect.signature(self._function).bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())


def _noting(function: Callable[..., Any], notes: Notes) -> Callable[..., Any]:
    """The function, with what it notes of gradients as a result more."""

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        with collecting(notes):
            results = function(*args)
        return results, notes.take()

    return noting


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # one written in C
        return []


def _compiles(function: Any) -> Callable[..., Any] | None:
    """What compiles a function of ``jax.jit`` for arguments, without running it."""
    if not hasattr(function, "lower"):
        return None
    return lambda *args, **kwargs: function.lower(*args, **kwargs).compile()

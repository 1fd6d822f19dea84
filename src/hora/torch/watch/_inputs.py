"""Looks at what models are fed, and at the random numbers that are drawn, in the first steps.

Hooks that torch calls for every module, and stand-ins for torch's random functions, are there only in
those steps.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hora.adapter import records
from hora.adapter.prints import combined
from hora.torch.watch._digest import sample

if TYPE_CHECKING:
    from hora.torch.watch._group import Group
    from hora.torch.watch._watch import Watch

__all__ = ["Inputs"]

FIRST = 8
"""Steps that are looked at from the start."""

MOST = 8
"""Tensors looked at per call of a model."""

FEW = 8
"""Numbers that may be drawn for a decision, such as skipping a layer, which ranks may well take alike."""

_DRAWING = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "bernoulli")


@dataclass
class _Forward:
    """One call of an outermost module, while training."""

    module: weakref.ref[torch.nn.Module]
    state: tuple[Any, ...]
    inputs: list[int] = field(default_factory=list)
    batch: int = 0
    drawn: bool = False
    """Whether noise was drawn, rather than a few numbers for a decision."""


class Inputs:
    """What has been fed since the last step.

    Attributes:
        is_open: whether it looks.
        followers: called at each step with a word for its inputs.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._depth = 0
        self._until = FIRST
        self._forwards: list[_Forward] = []
        self._noise: list[tuple[tuple[int, ...], int]] = []
        self._fetched: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []
        self.is_open = False
        self.followers: list[Callable[[str | None], None]] = []
        self.open(FIRST)

    def open(self, steps: int) -> None:
        """Look at the next so many steps."""
        self._until = max(self._until, self._watch.step + steps)
        if self._undo or self._watch.broken:
            return
        self._depth = 0
        self.is_open = True
        self._undo = [
            register_module_forward_pre_hook(self._enter).remove,
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True).remove,
            *(replace(torch, name, self._drawing) for name in _DRAWING),
        ]

    def close(self) -> None:
        """Look no more, until the next :meth:`open`."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.is_open = False
        self._forget()

    def roots(self) -> Iterator[torch.nn.Module]:
        """Modules that were called from outside of any module, while training."""
        return iter(list(self._roots))

    def fetched(self, drawn: Mapping[str, str]) -> None:
        """A batch was loaded; for each kind of generator that it drew from, the state from which."""
        if self._undo:
            for kind, state in drawn.items():
                self._fetched[kind] = f"{self._fetched.get(kind, '')} {state}"

    def stepped(self, group: Group) -> None:
        """An optimizer has made a step with what was fed."""
        if not self._undo:
            return
        own = {id(parameter) for parameter in group.parameters}
        fed = [forward for forward in self._forwards if _owns(forward.module(), own)]
        numbers = [number for forward in fed for number in forward.inputs]
        inputs = combined(numbers) if numbers else None
        for follow in self.followers:
            follow(inputs)
        if not group.is_learning:  # what is measured with a learning rate of 0 is no training
            self._until = self._watch.step + FIRST
        elif self._watch.size > 1 and group.fed < FIRST:
            group.fed += 1
            sizes = {forward.batch for forward in fed}
            noise = [number for shape, number in self._noise if shape[0] in sizes]
            states = [forward.state for forward in fed if forward.drawn]
            local = None if not group.distributed else _local(group.local)
            self._watch.reporter.send(
                records.fed(
                    key=group.key,
                    members=group.members,
                    step=group.fed,
                    where=group.where,
                    local=local,
                    inputs=inputs,
                    noise=combined(noise) if noise else None,
                    states=combined([hash_of(repr(state).encode()) for state in states]) if states else None,
                    fetched=self._fetched,
                )
            )
        self._forget()
        if self._watch.step >= self._until:
            self.close()

    def _forget(self) -> None:
        self._forwards.clear()
        self._noise.clear()
        self._fetched.clear()

    # --- hooks ----------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and module.training and torch.is_grad_enabled():
            self._forwards.append(_Forward(weakref.ref(module), random_state()))
            del self._forwards[:-64]

    def _leave(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._forwards or self._forwards[-1].module() is not module:
            return
        with self._harmless():
            forward = self._forwards[-1]
            self._roots.add(module)
            tensors = list(_tensors((args, kwargs)))[:MOST]
            forward.inputs = [sample(tensor) for tensor in tensors]
            forward.batch = max((tensor.shape[0] for tensor in tensors if tensor.dim()), default=0)
            drawn = _drawn(forward.state, random_state())
            # Some builds draw a single number for a whole dropout, from which they go on by themselves.
            forward.drawn = drawn >= max(FEW, forward.batch) or (drawn > 0 and _drops(module))

    def _drawing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and isinstance(result, torch.Tensor):
                with self._harmless():
                    large = result.dim() and result.numel() >= FEW and not result.is_meta
                    if large and len(self._noise) < 64:
                        self._noise.append((tuple(result.shape), sample(result)))
            return result

        return draw

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a fault of the watch is not the training's
            self.close()
            self._watch.give_up(error)


def random_state() -> tuple[Any, ...]:
    """The state of torch's generator on the CPU, and that of the GPU in use."""
    raw = torch.get_rng_state().numpy().tobytes()
    left, position = struct.unpack_from("<i4xQ", raw, 8)
    device = 0
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        device = hash(cuda.get_rng_state().numpy().tobytes())
    return combined([hash_of(raw[24:])]), left, position, device


def hash_of(data: bytes) -> int:
    """The same for the same bytes in every process."""
    import zlib

    return zlib.crc32(data)


def _drawn(before: Sequence[Any], after: Sequence[Any]) -> int:
    """How many numbers were drawn, at least. The generator makes them 624 at a time."""
    if before == after:
        return 0
    if before[3] != after[3]:
        return 1 << 30  # a GPU draws whole tensors
    if before[0] == after[0]:
        return int(before[1] - after[1])
    return int(before[1] + 624 - after[1])


def _local(values: Sequence[Any]) -> str | None:
    """One word for this rank's own gradients; None where all are zero or some are not finite."""
    numbers: list[float] = []
    for value in values:
        numbers += value.tolist() if isinstance(value, torch.Tensor) else [value]
    if not any(numbers) or any(number - number != 0 for number in numbers):
        return None
    return (
        ",".join(float(number).hex() for number in numbers)
        if len(numbers) < 3
        else combined([struct.unpack("<q", struct.pack("<d", number))[0] for number in numbers])
    )


def _owns(module: torch.nn.Module | None, own: set[int]) -> bool:
    return module is not None and any(id(parameter) in own for parameter in module.parameters())


def _tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.numel() and not tree.is_meta and tree.layout == torch.strided:
            yield tree
    elif depth < 4 and isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value, depth + 1)
    elif depth < 4 and isinstance(tree, list | tuple):
        for value in tree[:64]:
            yield from _tensors(value, depth + 1)


def _drops(module: torch.nn.Module) -> bool:
    return any(
        inner.training and ("Dropout" in type(inner).__name__ or getattr(inner, "dropout", 0))
        for inner in module.modules()
    )


def replace(
    module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put a stand-in in the place of a function; the result undoes it."""
    original = getattr(module, name)
    stand_in = make(original)
    stand_in.__name__, stand_in.__doc__ = name, original.__doc__
    # TorchScript knows torch's own functions by their identity.
    builtins: Any = torch.jit._builtins
    scripted = builtins._get_builtin_table()
    if id(original) in scripted:
        scripted[id(stand_in)] = scripted[id(original)]
    setattr(module, name, stand_in)

    def undo() -> None:
        if getattr(module, name) is stand_in:
            setattr(module, name, original)
        scripted.pop(id(stand_in), None)

    return undo

"""``horovod.common.util``: the helpers that scripts use."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ._face import face

__all__ = [
    "check_extension",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise ImportError unless Hora has this extension.

    Raises:
        ImportError: for other frameworks than PyTorch.
    """
    if not extension_available(ext_name):
        raise ImportError(
            f"{ext_name} is not available: Hora runs Horovod's scripts for PyTorch and TensorFlow."
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod's interface for this framework is there."""
    return ext_base_name.rpartition(".")[2] in ("torch", "tensorflow")


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Environment variables, inside ``with`` only; None takes one away."""
    former = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(former)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether the framework finds a GPU."""
    if ext_base_name.rpartition(".")[2] == "tensorflow":
        from hora.tensorflow import gpu_available as available

        return available()
    import torch

    return bool(torch.cuda.is_available())


def is_iterable(x: Any) -> bool:
    """Whether ``iter`` takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI carries tensors: never."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Whether Gloo carries tensors."""
    return bool(face().gloo_built())


def nccl_built(verbose: bool = False) -> int:
    """Version of NCCL, 0 without it."""
    return int(face().nccl_built())


def split_list(items: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Split a list into parts whose lengths differ by one at most, longer ones first."""
    share, extra = divmod(len(items), num_parts)
    ends = [share * part + min(part, extra) for part in range(num_parts + 1)]
    return [list(items[start:end]) for start, end in itertools.pairwise(ends)]


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

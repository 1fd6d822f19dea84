"""Imported before the script in each rank of ``hora verify``, by ``HORA_PRELOAD``: starts the recording.

What is to look on at a framework has to be there before the script takes functions from it, and no framework
is to be imported that the script does not use. So each recorder starts when the script has imported what it
looks on at.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hora.adapter.recording.recorder import recorder

__all__ = ["start"]


def start() -> None:
    """Wait for the script's imports; what is imported already is looked on at from now."""
    recorder()
    sys.meta_path.insert(0, _Finder())
    for name, following in _AFTER.items():
        if name in sys.modules:
            following()


def _torch() -> None:
    one = recorder()
    if not one.elsewhere and not {"keras", "tensorflow", "jax"} & sys.modules.keys():  # for themselves
        one.elsewhere = True
        importlib.import_module("hora.torch.verify._record_start").start()


def _jax() -> None:
    if "keras" not in sys.modules:
        importlib.import_module("hora.jax.verify").start()


def _tensorflow() -> None:
    if "hora.keras" not in sys.modules:  # else that is being imported, and comes after this
        _keras("hora.tensorflow")


def _keras(module: str = "hora.keras") -> None:
    if recorder().module:
        return
    recorder().take_charge(module)
    backend = importlib.import_module("hora.keras._backend").BACKEND
    if backend == "tensorflow":
        importlib.import_module("hora.tensorflow.verify").start()
    elif backend == "jax":
        importlib.import_module("hora.jax.verify").start()
    importlib.import_module("hora.keras.verify").start()


_AFTER: dict[str, Callable[[], None]] = {
    "torch": _torch,
    "jax": _jax,
    "hora.tensorflow": _tensorflow,
    "hora.keras": _keras,
}


class _Finder(MetaPathFinder):
    """Finds the modules of :data:`_AFTER` as Python does, and lets something follow their import."""

    def __init__(self) -> None:
        self._open = dict(_AFTER)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        following = self._open.pop(name, None)
        if following is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, following)
        return spec


class _Followed(Loader):
    """A loader after which something happens."""

    def __init__(self, loader: Any, following: Callable[[], None]) -> None:
        self._loader, self._following = loader, following

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._following()

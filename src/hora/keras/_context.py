"""``init()`` and ``shutdown()``: those of the backend's adapter, and Keras made fit for several ranks."""

from __future__ import annotations

from typing import Any

from hora.keras import _hooks
from hora.keras._backend import api

__all__ = ["init", "shutdown"]


def init(*args: Any, **options: Any) -> None:
    """Join the job: find the other workers and agree with them on who is who.

    Call it right after the imports: on TensorFlow and JAX it has to come before anything is computed, a model
    included. It is ``init`` of the backend's adapter (``hora.torch``, ``hora.tensorflow``, ``hora.jax``),
    with the same arguments; when that was called before, its job is used. Keras is changed in a few places
    until :func:`shutdown`: models train with all ranks' gradients as the backend's engine needs it, and only
    rank 0 shows progress.

    Args:
        args: as those of the adapter: ``world``.
        options: as those of the adapter: ``settings``, ``process_sets``.

    Raises:
        WorldError: as from the adapter, and its other errors.
    """
    if args or options or not api.is_initialized():
        api.init(*args, **options)
    guard = api.context().guard
    if guard is not None:
        guard.reporter.send({"kind": "module", "name": "hora.keras"})
    _hooks.install()


def shutdown() -> None:
    """Leave the job, and make Keras as it was. Every worker calls it at the same place, or none does."""
    _hooks.remove()
    api.shutdown()

"""An adapter of no framework, for tests: what those of TensorFlow and JAX build on the shared parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.ranks import run_ranks

from hora.adapter import process_sets
from hora.adapter.context import Context, caller, join, leave
from hora.adapter.current import Current
from hora.core.settings import Settings
from hora.core.world import World

__all__ = ["EVERYONE", "Set", "current", "init", "on_ranks", "shutdown"]

current: Current[Context] = Current("tests.adapter.stage")


class Set(process_sets.ProcessSet):
    current = current


class _Everyone(process_sets.Everyone, Set):
    pass


EVERYONE = _Everyone()


def init(world: World | None = None, settings: Settings | None = None, **options: Any) -> Context:
    return join(
        current,
        Context,
        everyone=EVERYONE,
        where=caller(1),
        world=world,
        settings=settings,
        leave_at_exit=shutdown,
        **options,
    )


def shutdown() -> None:
    leave(current)


def on_ranks(size: int, body: Callable[[Context], Any], **settings: Any) -> list[Any]:
    """What the body returns on each of ``size`` forked ranks, which have joined without a framework."""

    def run(world: World, chosen: Settings) -> Any:
        result = body(init(world, chosen))
        shutdown()
        return result

    return run_ranks(size, run, init=False, **settings)

"""For all tests: bodies on several ranks, tests that run alone, a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.room import Room

_room = pytest.StashKey[Room]()
_folder = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run the body on this many ranks (see tests/ranks.py)")
    config.addinivalue_line("markers", "alone: it measures seconds, so no other test runs meanwhile")
    given = getattr(config, "workerinput", None)  # by pytest-xdist, to each of its processes
    if given is None:
        place = tempfile.TemporaryDirectory(prefix="room-")
        config.add_cleanup(place.cleanup)
        config.stash[_folder] = place.name
    config.stash[_room] = Room(Path(config.stash[_folder] if given is None else given["room"]))
    config.add_cleanup(config.stash[_room].close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["room"] = node.config.stash[_folder]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    # Around all else of a test: its time limit does not count the seconds for which others are waited for.
    with item.config.stash[_room].entered(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def room(request: pytest.FixtureRequest) -> Room:
    """Where this process runs its tests: for those whose jobs go on when a test has ended."""
    return request.config.stash[_room]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        metafunc.fixturenames.append("ranks_size")
        metafunc.parametrize("ranks_size", mark.args, ids=[f"{size}-ranks" for size in mark.args])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Ranks are forked, which wants a process that other tests have not made threads in yet.
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process takes the next file: long ones first
        items.sort(key=lambda item: LONG.index(name) if (name := _file(item)) in LONG else len(LONG))


LONG = (
    "broken/test_broken.py",
    "odd/test_odd.py",
    "verify/test_frameworks.py",
    "keras/test_keras.py",
    "horovod/test_acceptance.py",
    "tensorflow/test_jobs.py",
    "torch/elastic/test_elastic_jobs.py",
    "benchmarks/test_smoke.py",
    "chaos/test_command.py",
    "jax/test_failures.py",
    "jax/test_operations.py",
    "jax/test_training.py",
    "parallel/test_engine.py",
    "parallel/test_engine_data.py",
    "verify/test_causes.py",
    "parallel/test_shard.py",
    "launch/test_hosts.py",
    "parallel/test_optimizer.py",
    "parallel/test_engine_hosts.py",
    "launch/test_guard.py",
    "cli/test_train.py",
    "parallel/test_resume.py",
    "parallel/test_join.py",
    "launch/test_end.py",
)
"""The files that take more than half a minute, the longest first."""


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    from tests.ranks import run_ranks

    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    size: int = pyfuncitem.callspec.params["ranks_size"]
    run_ranks(size, _Body(pyfuncitem.obj, arguments))
    return True


@dataclass
class _Body:
    function: Any
    arguments: dict[str, Any]

    def __call__(self) -> None:
        self.function(**self.arguments)


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Fails a test that leaves threads, child processes, variables, open files, shared memory or a group."""
    before, threads = _Traces.now(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # one that is on its way out, as the feeder of a closed queue, is no leak
    left = _Traces.now().beyond(before)
    assert not left, f"the test left behind: {'; '.join(left)}"


_SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_SKIP_MDS_QUERY",
    "TF_FORCE_GPU_ALLOW_GROWTH",
)
"""By pytest for each test, by PyTorch when the first optimizer of the session imports its compiler, and by
JAX and Keras when they are imported."""


@dataclass(frozen=True)
class _Traces:
    threads: frozenset[str]
    children: frozenset[str]
    environment: frozenset[tuple[str, str]]
    files: frozenset[str]
    shared_memory: frozenset[str]
    group: frozenset[str]

    @classmethod
    def now(cls) -> _Traces:
        return cls(
            threads=frozenset(
                f"{thread.name} ({thread.ident})"
                for thread in threading.enumerate()
                if not thread.name.startswith("pytest_timeout")
            ),
            children=frozenset(_children()),
            environment=frozenset(item for item in os.environ.items() if item[0] not in _SET_BY_OTHERS),
            files=frozenset(_open_files(tempfile.gettempdir())),
            shared_memory=frozenset(_shared_memory()),
            group=frozenset(_group()),
        )

    def beyond(self, before: _Traces) -> list[str]:
        left = []
        for name in ("threads", "children", "environment", "files", "shared_memory", "group"):
            more = getattr(self, name) - getattr(before, name)
            if more:
                left.append(f"{name.replace('_', ' ')}: {', '.join(map(str, sorted(more)))}")
        gone = {key for key, _ in before.environment} - {key for key, _ in self.environment}
        if gone:
            left.append(f"removed variables: {', '.join(sorted(gone))}")
        return left


def _children() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found += (task / "children").read_text().split()
    return found


def _open_files(folder: str) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the directory's own descriptor, closed by now
            continue
        # pytest captures output in files of the same folder that have no name any more.
        if target.startswith(folder) and not target.endswith("(deleted)"):
            found.append(target)
    return found


def _shared_memory() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return [*mapped, *(str(path) for path in Path("/dev/shm").glob(f"*_{os.getpid()}_*"))]


def _group() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return ["torch.distributed is initialized"]
    return []

"""``hora.run``: call a function on all ranks and return their results."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hora.core.errors import JobFailedError, LaunchError, MissingExtraError
from hora.core.rundir import RunDirectory, disk_errors
from hora.launch.execute import JobResult, run_job
from hora.launch.job import Elastic, FunctionTarget, Job, check_workers, locate

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int,
    env: Mapping[str, str] | None = None,
    run_dir: Path | str | None = None,
    timeout: float | None = None,
    restarts: int = 0,
    min_workers: int | None = None,
    max_workers: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``workers`` new workers and return the results by rank.

    For notebooks, tests and scripts that start their own workers. Each worker is a fresh interpreter
    (nothing is forked, so threads and GPU contexts of the caller do no harm) in which ``hora.torch.init()``
    finds its rank. A function that the workers can import travels by name; one of a notebook, of
    ``__main__`` or a closure travels by value, with cloudpickle.

    Args:
        fn: what to call.
        args: its positional arguments; they are copied to each worker.
        kwargs: its keyword arguments.
        workers: number of workers, at least 1.
        env: variables added to the workers' environment.
        run_dir: run directory to make. None: a temporary one, removed when all went well and kept, and
            named in the error, when not.
        timeout: seconds after which the workers are stopped and the job counts as failed; None: never.
        restarts: how often all workers are started again after a failure, as by ``hora run --restarts``: the
            function goes on from its checkpoints (``hora.torch.Checkpoints``).
        min_workers: of an elastic job, whose function goes through ``hora.torch.elastic.run``: it goes on
            with as few; 1 where only ``max_workers`` is given.
        max_workers: of an elastic job: the most, at least ``workers``, which is the default.

    Returns:
        One result per rank, in the order of ranks; of an elastic job those of the workers at its end.

    Raises:
        JobFailedError: a worker raised, ended otherwise, or gave a result that cannot be pickled. Its
            ``__cause__`` is the first failing rank's exception where that can be unpickled.
        LaunchError: the job cannot be started: arguments that cannot be pickled, a wrong number of workers.
        MissingExtraError: the function must travel by value and cloudpickle is not installed.
        KeyboardInterrupt: Ctrl-C; the workers were stopped.
    """
    check_workers(workers)
    elastic = _elastic(workers, min_workers, max_workers)
    if not callable(fn):
        raise LaunchError(
            f"hora.run got {type(fn).__name__} instead of a function.", fix="Write hora.run(train, args)."
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise LaunchError(
            f"hora.run got args={args!r}, which is no sequence of arguments.",
            fix=f"Write hora.run({getattr(fn, '__name__', 'train')}, ({args!r},), workers={workers}).",
        )
    name = getattr(fn, "__name__", type(fn).__name__).strip("<>")
    header, call = _payload(fn, tuple(args), dict(kwargs or {}))
    with _scratch() as scratch:
        results = scratch / "results"
        payload = scratch / "call.pickle"
        with disk_errors(payload):
            results.mkdir()
            payload.write_bytes(header + call)
        temporary = run_dir is None
        kept = (
            Path(tempfile.gettempdir()) / scratch.name.replace("call", "run")
            if run_dir is None
            else Path(run_dir)
        )
        result = run_job(
            Job(
                target=FunctionTarget(payload, results, name),
                workers=workers,
                env=env or {},
                run_dir=kept,
                name=name,
                timeout=timeout,
                restarts=restarts,
                elastic=elastic,
            ),
            announce=False,
        )
        if temporary and result.interrupted_by is not None:
            shutil.rmtree(kept, ignore_errors=True)  # no error will name it
        _pass_signal_on(result)
        values = _values(result, results, name)
    if temporary:
        shutil.rmtree(kept, ignore_errors=True)
    return values


def _elastic(workers: int, least: int | None, most: int | None) -> Elastic | None:
    if least is None and most is None:
        return None
    least, most = 1 if least is None else least, workers if most is None else most
    for name, number in (("min_workers", least), ("max_workers", most)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise LaunchError(f"{name}={number!r} is not a number of workers.", fix=f"Write {name}=1.")
    if not 1 <= least <= workers <= most:
        raise LaunchError(
            f"min_workers={least}, workers={workers} and max_workers={most} are not in ascending order.",
            fix=f"Write min_workers=1, workers={workers}, max_workers={max(workers, most)}.",
        )
    return Elastic(least=least, most=most)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with disk_errors(Path(tempfile.gettempdir())):
        path = Path(tempfile.mkdtemp(prefix="hora-call-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _payload(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, bytes]:
    call = (fn, args, kwargs)
    reason: Exception | None = None
    data = b""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or _importable(module):
        try:
            data = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - whatever a __reduce__ raises
            reason = error
    # A reference to __main__ names another module in the workers.
    by_value = not data or b"__main__" in data
    if by_value:
        data = _by_value(call, module, reason)
    header = {
        "path": [entry or str(Path.cwd()) for entry in sys.path],
        "argv": list(sys.argv),
        "by_value": by_value,
    }
    return pickle.dumps(header), data


def _importable(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False
    spec = locate(module.__name__, [entry or str(Path.cwd()) for entry in sys.path])
    own = getattr(module, "__file__", None)
    return spec is not None and (own is None or spec.origin == own)


def _by_value(call: tuple[Any, ...], module: ModuleType | None, reason: Exception | None) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            "The function or its arguments are defined in a notebook, in the script itself or inside another "
            "function, so they must travel by value; that needs cloudpickle, which is not installed.",
            fix="pip install 'hora[torch]', or move them to a module that the workers can import.",
        ) from reason
    register = module is not None and module.__name__ != "__main__" and not _importable(module)
    try:
        if register:
            cloudpickle.register_pickle_by_value(module)
        data: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise LaunchError(
            f"The function or its arguments cannot be pickled: {error}.",
            fix="Pass what the workers need to build the object (a path, say), and build it in them.",
        ) from error
    finally:
        if register:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _pass_signal_on(result: JobResult) -> None:
    """The workers are stopped; now the caller's own program gets what was meant for it."""
    if result.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if result.interrupted_by is not None:
        signal.raise_signal(result.interrupted_by)


def _values(result: JobResult, results: Path, name: str) -> list[Any]:
    if result.failure is not None:
        failure = result.failure
        cause = _exception(results / f"rank-{failure.rank}.pickle")
        found = f"hora: {failure.verdict.paragraph}\n" if failure.verdict else ""
        raise JobFailedError(
            f"{name}: {failure.summary}.",
            fix=f"See the logs in {result.run.path}.",
            report=found + failure.report,
            exit_code=failure.exit_code,
        ) from cause
    if result.exit_code != 0:
        text = result.message or f"hora: ended with exit code {result.exit_code}"
        raise JobFailedError(
            f"{name}: {text.removeprefix('hora: ')}",
            fix=f"See the logs in {result.run.path}.",
            report=f"{text}\n  logs: {result.run.path / 'logs'}",
            exit_code=result.exit_code,
        )
    workers = _size(result.run)
    return [_value(results / f"rank-{rank}.pickle", rank, result, name) for rank in range(workers)]


def _size(run: RunDirectory) -> int:
    """Workers at the end: those of the last world, where there are worlds."""
    if not run.worlds.is_file():
        return int(run.about()["workers"])
    return len(json.loads(run.worlds.read_text(encoding="utf-8").splitlines()[-1])["workers"])


def _value(path: Path, rank: int, result: JobResult, name: str) -> Any:
    try:
        _, value = pickle.loads(path.read_bytes())
    except Exception as error:
        missing = isinstance(error, FileNotFoundError)
        what = (
            "ended before the function returned"
            if missing
            else f"gave a result that cannot be unpickled: {error!r}"
        )
        raise JobFailedError(
            f"{name}: rank {rank} {what}.",
            fix="Return plain values, arrays or tensors.",
            report=f"hora: rank {rank} {what}\n  log: {result.run.log(rank)}",
            exit_code=1,
        ) from error
    return value


def _exception(path: Path) -> Exception | None:
    try:
        well, error = pickle.loads(path.read_bytes())
    except Exception:  # noqa: BLE001 - an exception's __init__ can raise anything; the report has its text
        return None
    return error if not well and isinstance(error, Exception) else None

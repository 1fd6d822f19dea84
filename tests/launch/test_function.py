"""hora.run: a function on all ranks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.conftest import SOURCE, Bench

import hora
from hora.core.errors import JobFailedError, LaunchError, MissingExtraError, RunDirectoryError


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary run directories go where the test can look at them."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def _left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "tmp").iterdir())


def _scaled(value: int, *, by: int = 1) -> tuple[int, int]:
    return int(os.environ["HORA_RANK"]), value * by


def test_results_come_by_rank_and_nothing_is_left(tmp_path: Path) -> None:
    assert hora.run(_scaled, (5,), {"by": 3}, workers=3) == [(0, 15), (1, 15), (2, 15)]
    assert _left(tmp_path) == []


def _fails_once(folder: str) -> str:
    place = Path(folder, "failed")
    if not place.exists():
        place.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["HORA_ATTEMPT"]


def test_restarts_call_the_function_again(tmp_path: Path) -> None:
    assert hora.run(_fails_once, (str(tmp_path),), workers=1, restarts=1) == ["2"]
    assert _left(tmp_path) == []


def _elastic_worker() -> tuple[int, int, int]:
    """Speaks to the supervisor as hora.torch.elastic does; the first worker dies when all are there."""
    from hora.core.elastic import control
    from hora.core.settings import load

    settings = load()
    link = control(settings)
    assert link is not None
    assert settings.worker is not None
    member = link.join(settings, prepared=False) or link.join(settings, prepared=True)
    while True:
        assert member is not None
        link.tell("running", number=member.number)
        if member.number == 0:
            if settings.worker == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            assert link.reset_due(20) is not None
        elif link.finish():
            return settings.worker, member.place.rank, member.place.size
        member = link.join(settings, prepared=True)


def test_an_elastic_function_gives_the_results_of_who_was_there_at_the_end(tmp_path: Path) -> None:
    results = hora.run(_elastic_worker, workers=2, min_workers=2, max_workers=3)
    assert results == [(1, 0, 2), (2, 1, 2)]
    assert _left(tmp_path) == []


@pytest.mark.parametrize(("least", "most"), [(3, None), (0, None), (1, 1), (True, None), (None, 2.5)])
def test_numbers_of_workers_out_of_order_are_refused(least: Any, most: Any) -> None:
    with pytest.raises(LaunchError, match=r"m(in|ax)_workers="):
        hora.run(_scaled, (1,), workers=2, min_workers=least, max_workers=most)


def test_a_function_of_an_installed_module_travels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # not installed
    assert hora.run(os.path.basename, ("a/b",), workers=2) == ["b", "b"]


def test_a_closure_travels_by_value() -> None:
    secret = 42
    assert hora.run(lambda x: x + secret, (1,), workers=2) == [43, 43]


def test_without_cloudpickle_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hora\[torch\]'"):
        hora.run(lambda: 1, workers=1)


def test_functions_and_classes_of_main(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import dataclasses, os, hora
            @dataclasses.dataclass
            class Point:
                x: int
            def work(point):
                return Point(point.x + int(os.environ["HORA_RANK"]))
            if __name__ == "__main__":
                points = hora.run(work, (Point(10),), workers=2)
                assert points == [Point(10), Point(11)], points
                print("same class:", all(type(point) is Point for point in points))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.stdout == "same class: True\n", done.stderr


def _fail_on_one(kind: str) -> int:
    if os.environ["HORA_RANK"] != "1":
        return 1
    if kind == "raise":
        raise KeyError("which rank am I?")
    if kind == "exit":
        os._exit(7)
    if kind == "unpicklable result":
        return threading.Lock()  # type: ignore[return-value]
    if kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 2


def test_an_exception_comes_back_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError) as caught:
        hora.run(_fail_on_one, ("raise",), workers=2)
    error = caught.value
    assert isinstance(error.__cause__, KeyError)
    assert error.exit_code == 1
    assert "rank 1 of 2 failed" in error.report
    assert "KeyError: 'which rank am I?'" in error.report
    assert "_worker.py" not in error.report
    (kept,) = _left(tmp_path)  # the run directory of a failed job stays, and the error names it
    assert kept in str(error)
    assert (tmp_path / "tmp" / kept / "logs" / "rank-1.log").exists()


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("exit", 7, "exit code 7"),
        ("segfault", 139, "SIGSEGV"),
        ("unpicklable result", 1, "the result of rank 1, a lock, cannot be pickled"),
    ],
)
def test_other_failures(kind: str, code: int, words: str) -> None:
    with pytest.raises(JobFailedError) as caught:
        hora.run(_fail_on_one, (kind,), workers=2)
    assert caught.value.exit_code == code
    assert words in caught.value.report


class _Trap:
    """Pickles well, and explodes when it is unpickled in another program."""

    def __reduce__(self) -> Any:
        return _explode_outside, (os.getpid(),)


def _explode_outside(pid: int) -> _Trap:
    if os.getpid() != pid:
        raise RuntimeError("not here")
    return _Trap()


class _TrapError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("needs two arguments to be unpickled")


def _raise_trap() -> None:
    raise _TrapError(1, 2)


def test_a_result_that_cannot_be_unpickled() -> None:
    with pytest.raises(JobFailedError, match="cannot be unpickled") as caught:
        hora.run(_Trap, workers=1)
    assert "not here" in caught.value.report


def test_an_exception_that_cannot_be_unpickled_still_has_its_report() -> None:
    with pytest.raises(JobFailedError) as caught:
        hora.run(_raise_trap, workers=1)
    assert caught.value.__cause__ is None
    assert "needs two arguments" in caught.value.report


def test_arguments_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be pickled"):
        hora.run(_scaled, (threading.Lock(),), workers=1)
    assert _left(tmp_path) == []


def test_a_worker_that_ends_early_with_code_0() -> None:
    with pytest.raises(JobFailedError, match="ended before the function returned"):
        hora.run(os._exit, (0,), workers=1)


def test_not_a_function() -> None:
    with pytest.raises(LaunchError, match="instead of a function"):
        hora.run("train", workers=1)  # type: ignore[arg-type]


def test_wrong_number_of_workers_and_occupied_directory(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="number of workers"):
        hora.run(_scaled, (1,), workers=0)
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="occupied"):
        hora.run(_scaled, (1,), workers=1, run_dir=tmp_path)
    assert _left(tmp_path) == []


def test_own_run_directory_and_variables(tmp_path: Path) -> None:
    assert hora.run(os.getenv, ("COLOUR",), workers=1, env={"COLOUR": "red"}, run_dir=tmp_path / "r") == [
        "red"
    ]
    assert (tmp_path / "r" / "run.json").exists()


def test_timeout() -> None:
    with pytest.raises(JobFailedError, match="timeout of 0.3 s") as caught:
        hora.run(time.sleep, (60,), workers=1, timeout=0.3)
    assert caught.value.exit_code == 124


def test_from_a_thread_among_threads() -> None:
    """As in a notebook: the ranks are started by a thread that is not the main one, and outlive no one."""
    stop = threading.Event()
    idle = [threading.Thread(target=stop.wait) for _ in range(20)]
    results: list[Any] = []
    work = threading.Thread(target=lambda: results.extend(hora.run(_scaled, (1,), workers=2)))
    for thread in (*idle, work):
        thread.start()
    work.join(timeout=20)
    stop.set()
    for thread in idle:
        thread.join()
    assert results == [(0, 1), (1, 1)]


def _say() -> None:
    print("to the notebook")


def test_output_goes_to_the_callers_streams(capsys: pytest.CaptureFixture[str]) -> None:
    hora.run(_say, workers=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] to the notebook", "[1] to the notebook"]


def test_ctrl_c_stops_the_workers_and_interrupts_the_caller(bench: Bench) -> None:
    program = bench.folder / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import time, hora
            def work():
                print("ready", flush=True)
                time.sleep(600)
            if __name__ == "__main__":
                try:
                    hora.run(work, workers=1)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
            """
        )
    )
    (bench.folder / "temporary").mkdir()
    bench.environ |= {"TEST_MARK": bench.folder.name, "TMPDIR": str(bench.folder / "temporary")}
    with subprocess.Popen(
        [sys.executable, str(program)], env=bench.environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 0
    assert not bench.marked(bench.folder.name)
    assert list((bench.folder / "temporary").iterdir()) == []


def test_signal_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    hora.run(os.getpid, workers=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_no_descriptor_or_thread_is_left() -> None:
    hora.run(os.getpid, workers=1)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    hora.run(os.getpid, workers=3)
    with pytest.raises(JobFailedError):
        hora.run(_fail_on_one, ("exit",), workers=2)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert threading.active_count() == threads


def test_large_results_and_exact_pickles() -> None:
    (data,) = hora.run(bytes, (5_000_000,), workers=1)
    assert data == bytes(5_000_000)
    assert pickle.loads(pickle.dumps(JobFailedError("a", fix="b", report="c", exit_code=3))).exit_code == 3

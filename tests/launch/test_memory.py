"""Recognising what the kernel's out-of-memory killer did."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hora.core.rundir import RunDirectory
from hora.launch import Job, ScriptTarget, _memory, run_job, supervisor
from hora.launch._memory import MemoryWatch
from hora.launch.failure import Outcome, judge


def _files(folder: Path, *, version: int, kills: int) -> dict[str, Path]:
    cgroups = folder / "cgroups"
    group = cgroups / ("memory/job" if version == 1 else "job")
    group.mkdir(parents=True, exist_ok=True)
    if version == 1:
        (group / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (group / "memory.limit_in_bytes").write_text(f"{64 * 2**20}\n")
        own = "9:name=systemd:/\n4:memory:/job\n0::/\n"
    else:
        (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 2\noom_kill {kills}\n")
        (group / "memory.max").write_text("max\n")
        own = "0::/job\n"
    (folder / "own").write_text(own)
    (folder / "vmstat").write_text("nr_free_pages 9\noom_kill 5\n")
    return {"vmstat": folder / "vmstat", "own_cgroup": folder / "own", "cgroups": cgroups}


@pytest.mark.parametrize(("version", "words"), [(1, "64 MiB"), (2, "memory limit")])
def test_the_counter_of_the_memory_cgroup(tmp_path: Path, version: int, words: str) -> None:
    watch = MemoryWatch(**_files(tmp_path, version=version, kills=3))
    assert watch.rose() is None
    _files(tmp_path, version=version, kills=4)
    reason = watch.rose()
    assert reason is not None
    assert words in reason


def test_the_counter_of_the_host(tmp_path: Path) -> None:
    watch = MemoryWatch(**_files(tmp_path, version=2, kills=0))
    (tmp_path / "vmstat").write_text("oom_kill 6\n")
    assert watch.rose() == "the host ran out of memory"


def test_a_container_shows_its_own_group_at_the_top_of_the_mount(tmp_path: Path) -> None:
    files = _files(tmp_path, version=2, kills=0)
    (tmp_path / "own").write_text("0::/../../elsewhere/deep\n")
    (tmp_path / "cgroups" / "memory.events").write_text("oom_kill 1\n")
    watch = MemoryWatch(**files)
    (tmp_path / "cgroups" / "memory.events").write_text("oom_kill 2\n")
    assert watch.rose() is not None


def test_without_any_counter_nobody_can_tell(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert MemoryWatch(nothing, own_cgroup=nothing, cgroups=nothing).rose() is None


def test_the_report_of_a_job_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real job with a real SIGKILL; only the counter is a file that the rank itself counts up."""
    files = _files(tmp_path, version=1, kills=0)
    monkeypatch.setattr(supervisor, "MemoryWatch", lambda: MemoryWatch(**files))
    counter = tmp_path / "cgroups/memory/job/memory.oom_control"
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '1':\n"
        f"    open({str(counter)!r}, 'w').write('oom_kill 1\\n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = run_job(Job(target=ScriptTarget(str(script)), workers=2, run_dir=tmp_path / "run"))
    assert result.exit_code == 137
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed" in err
    assert (
        "SIGKILL, killed because memory ran out (the memory limit of this container or cgroup, 64 MiB" in err
    )
    assert "smaller micro-batch" in err


def test_an_exception_after_the_killer_took_a_loader_worker_mentions_it(tmp_path: Path) -> None:
    record = {
        "time": 1.0,
        "type": "RuntimeError",
        "message": "DataLoader worker (pid 1) is killed by signal: Killed.",
        "traceback": "RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed.\n",
        "echo": False,
        "exit": False,
    }
    outcome = Outcome(rank=0, code=1, ended=2.0, record=record, memory="the host ran out of memory")
    failure = judge([outcome], RunDirectory(tmp_path))
    assert failure is not None
    assert (
        "The kernel's out-of-memory killer ran during the job: the host ran out of memory." in failure.report
    )


def test_a_plain_sigkill_is_not_called_out_of_memory(tmp_path: Path) -> None:
    failure = judge([Outcome(rank=0, code=-signal.SIGKILL, ended=2.0)], RunDirectory(tmp_path))
    assert failure is not None
    assert "memory" not in failure.report


def test_the_real_counters_can_be_read_here() -> None:
    if not _memory.VMSTAT.exists():
        pytest.skip("no /proc/vmstat")
    assert _memory._count(_memory.VMSTAT) is not None

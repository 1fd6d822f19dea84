"""A disk and a network of the job's own: filled, cut, and gone at the end. These need namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hora.chaos.processes import tcp_ports
from hora.chaos.stage import Stage
from hora.core.errors import ChaosError

MEGABYTE = 2**20

MAY = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--mount", "--net", "true"], check=False, capture_output=True).returncode
    == 0
)
needs_namespaces = pytest.mark.skipif(not MAY, reason="namespaces need root and util-linux")


def started(stage: Stage, script: str, folder: Path) -> Path:
    """Start a program, which ends when it reads a line from ``in``; the file that gets its output."""
    os.mkfifo(folder / "in")
    output = folder / "output"
    code = textwrap.dedent(script)
    stage.start([sys.executable, "-c", code, str(folder / "in")], os.environ, output)
    return output


def end(folder: Path) -> None:
    (folder / "in").write_text("\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@needs_namespaces
def test_the_small_disk_is_filled_and_what_is_on_it_is_kept(tmp_path: Path, run: Path) -> None:
    stage = Stage(run, disk=4 * MEGABYTE)
    script = f"""
        import os, sys
        open("{run}/first", "w").write("whole")
        open(sys.argv[1]).readline()
        os.write(os.open("{run}/second", os.O_CREAT | os.O_WRONLY), b"written again")
    """
    output = started(stage, script, tmp_path)
    wait_for((stage.folder / "first").exists)
    assert stage.folder.stat().st_dev != run.stat().st_dev
    took = stage.fill()
    assert 3 * MEGABYTE < took <= 4 * MEGABYTE
    assert os.statvfs(stage.folder).f_bavail == 0
    with pytest.raises(OSError, match="No space"):
        (stage.folder / "third").write_bytes(bytes(4096))
    assert not any(run.iterdir())  # nobody outside sees it
    stage.empty()
    end(tmp_path)
    assert stage.process.wait(10) == 0, output.read_text()
    stage.close()
    kept = {path.name: path.read_text() for path in run.iterdir()}
    assert kept == {"first": "whole", "second": "written again", "third": ""}


TALKING = """
    import socket, sys, time
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    other.settimeout(0.05)
    since = time.monotonic()
    one.sendall(b"x")
    while True:
        try:
            other.recv(1)
        except TimeoutError:
            continue
        now = time.monotonic()
        if now - since > 0.5:
            print(f"{now - since:.3f}", flush=True)
            break
        since = now
        one.sendall(b"x")
    open(sys.argv[1]).readline()
"""


@needs_namespaces
def test_a_cut_connection_is_silent_until_it_is_healed(tmp_path: Path, run: Path) -> None:
    stage = Stage(run, net=True)
    output = started(stage, TALKING, tmp_path)
    assert Path(f"/proc/{stage.process.pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
    wait_for(lambda: len(tcp_ports(stage.process.pid)) == 2)
    time.sleep(0.2)  # bytes go back and forth meanwhile
    assert output.read_text() == ""
    stage.cut(tcp_ports(stage.process.pid))
    time.sleep(0.6)  # this is the cut itself
    assert output.read_text() == ""
    stage.heal()
    wait_for(output.read_text)
    assert 0.5 < float(output.read_text()) < 8
    end(tmp_path)
    assert stage.process.wait(10) == 0


@pytest.fixture
def nobody() -> Iterator[None]:
    """Without the right to make namespaces."""
    old = os.environ["PATH"]
    os.environ["PATH"] = "/nowhere"
    yield
    os.environ["PATH"] = old


def test_a_place_without_namespaces_is_told_so(run: Path, tmp_path: Path, nobody: None) -> None:
    with pytest.raises(
        ChaosError, match="cannot have a disk or a network of its own here: there is no unshare"
    ):
        Stage(run, disk=MEGABYTE).start(["true"], {}, tmp_path / "output")
    with pytest.raises(ChaosError, match="there is no unshare, ip, nsenter"):
        Stage(run, net=True).start(["true"], {}, tmp_path / "output")


def test_without_either_the_job_is_where_it_would_be(run: Path, tmp_path: Path) -> None:
    stage = Stage(run)
    stage.start([sys.executable, "-c", "print('here')"], os.environ, tmp_path / "output")
    assert stage.process.wait(10) == 0
    stage.close()
    assert (tmp_path / "output").read_text() == "here\n"


def test_the_job_ends_with_the_one_that_disturbs_it(run: Path, tmp_path: Path) -> None:
    """Also when that one is killed, and can do nothing about it."""
    code = f"""
        import os, sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from hora.chaos.stage import Stage
        stage, output = Stage(Path({str(run)!r})), Path({str(tmp_path / "output")!r})
        stage.start([sys.executable, "-c", "import signal; signal.pause()"], os.environ, output)
        print(stage.process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        job = int(one.stdout.readline())
    wait_for(
        lambda: not Path(f"/proc/{job}/cmdline").exists() or not Path(f"/proc/{job}/cmdline").read_bytes()
    )

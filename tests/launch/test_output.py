"""What reaches the console and the logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch.conftest import SOURCE, Bench

from hora.launch.output import LONGEST_LINE, REDRAW_SECONDS, Lines, Log


def test_streams_stay_apart_and_lines_whole(bench: Bench) -> None:
    ended = bench(
        """
        for i in range(200):
            os.write(1, b"out"); os.write(1, b" %d\\n" % i)
            os.write(2, b"err"); os.write(2, b" %d\\n" % i)
        """,
        workers=4,
    )
    assert ended.code == 0
    for rank in range(4):
        ours = [line for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert ours == [f"[{rank}] out {i}" for i in range(200)]
        ours = [line for line in ended.err.splitlines() if line.startswith(f"[{rank}] ")]
        assert ours == [f"[{rank}] err {i}" for i in range(200)]
        assert sorted(ended.log(rank).splitlines()) == sorted(
            f"{stream} {i}" for i in range(200) for stream in ("out", "err")
        )
    assert len(ended.out.splitlines()) == 800


def test_log_keeps_the_order_of_arrival(bench: Bench) -> None:
    ended = bench(
        """
        for i in range(3):
            print('out', i); time.sleep(0.05)
            print('err', i, file=sys.stderr); time.sleep(0.05)
        """,
        workers=1,
    )
    assert ended.log(0).splitlines() == ["out 0", "err 0", "out 1", "err 1", "out 2", "err 2"]


def test_without_prefix_and_quiet(bench: Bench) -> None:
    path = bench.script("print('x'); print('y', file=sys.stderr)")
    plain = bench.run("--no-output-rank-prefix", str(path))
    assert plain.out == "x\n"
    quiet = bench.run("--quiet", "--run-dir", str(bench.folder / "second"), "-n", "2", str(path))
    assert (quiet.out, quiet.err) == ("", "")
    assert (bench.folder / "second" / "logs" / "rank-1.log").read_text() == "x\ny\n"


def test_quiet_still_reports_a_failure(bench: Bench) -> None:
    ended = bench("raise ValueError('x')", "--quiet", workers=1)
    assert ended.err.startswith("hora: rank 0 of 1 failed")


def test_binary_garbage_unfinished_lines_and_carriage_returns(bench: Bench) -> None:
    ended = bench(
        r"""
        os.write(1, b"caf\xc3\xa9 \xff\xfe\n")
        os.write(1, b"10%\r20%\r30%\n")
        os.write(1, b"dos\r\n")
        os.write(1, b"no newline")
        """,
        workers=1,
    )
    assert ended.out == "[0] caf\u00e9 \ufffd\ufffd\n[0] 30%\n[0] dos\n[0] no newline\n"
    assert (ended.run / "logs" / "rank-0.log").read_bytes() == (
        b"caf\xc3\xa9 \xff\xfe\n10%\r20%\r30%\ndos\r\nno newline"
    )


def test_much_output_is_fast(bench: Bench) -> None:
    path = bench.script("block = (b'x' * 99 + b'\\n') * 10000\nfor _ in range(100): os.write(1, block)")
    began = time.monotonic()
    process = bench.start(str(path), stdout=subprocess.DEVNULL)
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - began < 20
    assert (bench.run_dir / "logs" / "rank-0.log").stat().st_size == 100_000_000


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_up_the_end(bench: Bench) -> None:
    ended = bench(
        """
        if os.fork() == 0:
            while True: os.write(1, b"noise\\n")
        print("done")
        """,
        workers=1,
    )
    assert ended.code == 0
    assert "[0] done" in ended.out
    assert "left behind" in ended.err
    assert ended.seconds < 20


def test_a_rank_that_closes_its_output_goes_on(bench: Bench) -> None:
    ended = bench(
        "sys.stdout.close(); os.close(1); sys.stderr.close(); os.close(2); time.sleep(0.3); os._exit(4)"
    )
    assert ended.code == 4


def test_a_closed_stdout_ends_the_job_quietly(bench: Bench) -> None:
    path = bench.script("while True: print('line', flush=True)")
    process = bench.start("-n", "2", str(path))
    assert process.stdout is not None
    assert process.stdout.readline() in ("[0] line\n", "[1] line\n")
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=10) == 141
    assert [line for line in err.splitlines() if not line.startswith("hora: 2 workers, run dir")] == []


def test_a_reader_that_stands_still_does_not_keep_the_job_from_being_stopped(bench: Bench) -> None:
    path = bench.script("open(f'ready-{rank}', 'w').close()\nwhile True: print('x' * 1000)")
    process = bench.start("-n", "2", str(path))
    bench.wait_for(lambda: len(list(bench.folder.glob("ready-*"))) == 2)
    time.sleep(0.3)  # until the pipe is full
    process.terminate()
    assert process.wait(timeout=4) == 143


def test_progress_of_rank_0_is_shown_as_plain_lines_without_a_terminal(bench: Bench) -> None:
    ended = bench(
        """
        from hora.core.progress import Progress, display
        from hora.core.settings import load
        shown = display(load(), stream=sys.stderr)
        shown.note("target reached")
        shown.update(Progress(done=10, total=10, values={"loss": 0.5}))
        shown.close()
        """
    )
    assert ended.code == 0, ended.err
    assert "target reached\n" in ended.err
    assert "100 %" in ended.err
    assert "\r" not in ended.err
    assert "\x1b" not in ended.err


def test_garbage_on_the_status_pipe_is_ignored(bench: Bench) -> None:
    ended = bench(
        r"""
        if rank == 0:
            note = b'{"kind": "note", "text": "well"}'
            os.write(int(os.environ["HORA_STATUS_FD"]), (b"\xff{]\n" + note + b"\n") * 3)
        """
    )
    assert ended.code == 0
    assert ended.err.count("well\n") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_full_disk_costs_the_logs_not_the_job(bench: Bench) -> None:
    disk = bench.folder / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        path = bench.script("for _ in range(300): os.write(1, b'x' * 99999 + b'\\n')\nprint('end')")
        ended = bench.run("--run-dir", str(disk / "run"), "-n", "2", str(path))
        assert ended.code == 0
        assert ended.err.count("logs in ") == 1
        assert "the disk is full" in ended.err
        assert "Traceback" not in ended.err
        again = bench.run("--run-dir", str(disk / "run-2"), "-n", "2", str(path))
        assert again.code == 2
        assert "MB are free" in again.err
        assert not (disk / "run-2").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- the line splitter by itself --------------------------------------------------------------


def test_lines_come_out_whole_however_they_are_cut() -> None:
    text = b"first\nsecond line\n\nthird"
    for size in range(1, len(text) + 1):
        lines = Lines()
        out = b"".join(lines.feed(text[i : i + size], 0.0) for i in range(0, len(text), size))
        assert out == b"first\nsecond line\n\n"
        assert lines.close() == b"third\n"
        assert lines.close() == b""


def test_a_bar_is_shown_seldom_and_only_when_it_changed() -> None:
    lines = Lines()
    assert lines.feed(b"10%\r", 100.0) == b""
    assert lines.redraw == 100.0 + REDRAW_SECONDS
    assert lines.feed(b"20%\r", 101.0) == b""
    assert lines.unfinished(105.0) == b"20%\n"
    assert lines.unfinished(110.0) == b""
    assert lines.redraw == 110.0 + REDRAW_SECONDS
    assert lines.feed(b"30%\ndone\n", 111.0) == b"30%\ndone\n"
    assert lines.redraw is None


def test_an_endless_line_comes_in_pieces_that_split_no_character() -> None:
    lines = Lines()
    text = "\u00e9" * LONGEST_LINE
    out = b"".join(lines.feed(text.encode()[i : i + 9999], 0.0) for i in range(0, 2 * LONGEST_LINE, 9999))
    out += lines.close()
    assert out.replace(b"\n", b"").decode() == text
    assert all(len(line) <= LONGEST_LINE for line in out.split(b"\n"))


@pytest.mark.alone
def test_splitting_a_long_line_with_carriage_returns_takes_linear_time() -> None:
    began = time.monotonic()
    Lines().feed(b"x" * 2_000_000 + b"\r\n" + b"\r" * 200_000 + b"\n", 0.0)
    assert time.monotonic() - began < 5.0


def test_log_complains_once_and_goes_on() -> None:
    said: list[str] = []
    log = Log(Path("/dev/full"), said.append)
    log.feed(0, b"lost\n")
    log.feed(1, b"lost too\n")
    log.close()
    assert len(said) == 1
    assert "the disk is full" in said[0]


def test_output_under_a_stream_that_is_no_file(tmp_path: Path) -> None:
    """As in a notebook: sys.stdout is an object with write() alone."""
    script = tmp_path / "job.py"
    script.write_text("print('hi')\n")
    program = f"""
import contextlib, io, pathlib
from hora.launch import Job, ScriptTarget, run_job
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    run_job(Job(target=ScriptTarget({str(script)!r}), run_dir=pathlib.Path({str(tmp_path / "run")!r})))
assert out.getvalue() == "[0] hi\\n", out.getvalue()
"""
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, check=False)
    assert done.returncode == 0

"""The supervisor's half of the guard: what ranks write by hand, and what becomes of it."""

from __future__ import annotations

import json
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.conftest import SOURCE, Bench, Launched

import hora
from hora.core.errors import JobFailedError
from hora.core.rundir import RunDirectory
from hora.launch import Job, ScriptTarget, run_job
from hora.launch._guard import Guard
from hora.launch._link import LONGEST_RECORD, MOST_WAITING
from hora.launch._loop import Loop

HAND = """
import json, socket, zlib
from hora.guard.board import Board, Phase
size = int(os.environ["HORA_SIZE"])
slot = Board(int(os.environ["HORA_GUARD_BOARD"]), size).slot(rank)
link = socket.socket(fileno=int(os.environ["HORA_GUARD_FD"]))
lines = link.makefile()

def send(**record):
    link.sendall(json.dumps(record).encode() + b"\\n")

def call(text, shape, number=1, where="train.py:7"):
    send(kind="call", id=number, signature={"shape": shape}, text=text, where=where, condition=None)
    slot.enter(0, number, number, zlib.crc32(str(shape).encode()))
    slot.phase(Phase.CHECKING, 0, number, time.monotonic())
    send(kind="check", set=0, number=number)
    hear()

class VerdictError(Exception):
    echo = False

def hear():
    record = json.loads(lines.readline())
    if record["kind"] == "alarm":
        print("alarm", record["verdict"]["kind"], sorted(record["verdict"]))
        VerdictError.echo = record["verdict"]["kind"] == "rank-failed"
        raise VerdictError(record["verdict"]["text"])
    assert record == {"kind": "clear", "set": 0, "number": record["number"]}

"""

FIELDS = sorted(["kind", "text", "advice", "ranks", "hosts", "call", "where", "step", "time"])


def verdicts(run: Path) -> list[dict[str, Any]]:
    path = RunDirectory.open(run).verdicts
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def own(ended: Launched) -> list[str]:
    """What Hora itself said, without the line about the start."""
    return [line for line in ended.err.splitlines() if not line.startswith("hora: ") or "worker" not in line]


@pytest.mark.parametrize("size", [2, 5])
def test_a_verdict_is_shown_once_written_down_and_raised_by_all(bench: Bench, size: int) -> None:
    ended = bench(
        HAND + "call(f'allreduce of rank {rank}', [rank == 1], where=f'train.py:{rank}')", workers=size
    )
    assert ended.code == 1
    assert ended.err.count("The ranks call different collectives.") == 1
    assert ended.err.count("\n  (More: hora explain mismatched-calls)\n") == 1
    assert "Traceback" not in ended.err
    [verdict] = verdicts(ended.run)
    assert sorted(verdict) == FIELDS
    assert verdict["kind"] == "mismatched-calls"
    assert verdict["where"] in ("train.py:0", "train.py:1")
    assert len(verdict["hosts"]) == 1
    alarms = [line for line in ended.out.splitlines() if "alarm" in line]
    assert sorted(alarms) == [f"[{rank}] alarm mismatched-calls {FIELDS}" for rank in range(size)]
    report = ended.err.splitlines()[-3:]
    who = "ranks 0 and 1" if size == 2 else "ranks 0 to 4"
    assert report[0] == "hora: job stopped by the verdict mismatched-calls (above)"
    assert report[1] == f"  {who}: told by the guard, and ended"
    assert report[2].startswith("  log: run/logs/rank-")
    about = json.loads((ended.run / "run.json").read_text())
    assert about["failure"] == "job stopped by the verdict mismatched-calls"


def test_equal_calls_go_on_and_leave_no_verdict(bench: Bench) -> None:
    ended = bench(
        HAND + "for number in range(1, 50): call('allreduce', [number], number)\nprint('done')", workers=3
    )
    assert ended.code == 0
    assert ended.out.count("done") == 3
    assert not (ended.run / "verdicts.jsonl").exists()


@pytest.mark.alone
def test_a_failure_reaches_the_others_before_the_failed_rank_has_ended(bench: Bench) -> None:
    ended = bench(
        HAND
        + """
if rank == 1:
    import atexit
    atexit.register(time.sleep, 1.5)
    raise ValueError(repr(time.time()))
try:
    hear()
finally:
    print("heard", time.time())
"""
    )
    assert ended.code == 1
    raised = float(ended.err.split("ValueError: ")[1].split()[0])
    heard = float(ended.out.split("heard ")[1].split()[0])
    assert heard - raised < 1.0
    assert "rank 1 of 2 failed" in ended.err
    assert "rank 0: told by the guard, and ended" in ended.err
    assert ended.err.count("ValueError") == 3  # headline, raising line, last line: the ordinary report, once
    [verdict] = verdicts(ended.run)
    assert (verdict["kind"], verdict["ranks"]) == ("rank-failed", [1])
    assert verdict["where"].endswith("job.py:36")
    assert "Traceback (most recent call last):" in verdict["text"]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "Rank 1 failed: SIGKILL: killed from outside"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "Rank 1 failed: SIGSEGV: segmentation fault"),
        ("os._exit(3)", 3, "Rank 1 failed: exit code 3"),
        ("sys.exit(4)", 4, "exit code 4"),
        ("sys.exit('no data')", 1, "exit code 1: no data"),
    ],
)
def test_each_way_to_die_is_told(bench: Bench, end: str, code: int, words: str) -> None:
    ended = bench(HAND + f"if rank == 1: {end}\nhear()", workers=3)
    assert ended.code == code
    assert ended.seconds < 4
    [verdict] = verdicts(ended.run)
    assert words in verdict["text"]
    assert ended.out.count("alarm rank-failed") == 2


@pytest.mark.alone
def test_an_echo_is_told_only_when_nothing_better_comes(bench: Bench) -> None:
    body = """
if rank == 0:
    raise ConnectionResetError("Connection reset by peer")
if rank == 1:
    time.sleep(0.3)
    raise KeyError("the real one")
hear()
"""
    ended = bench(HAND + body, workers=3)
    [verdict] = verdicts(ended.run)
    assert verdict["ranks"] == [1]
    assert "the real one" in verdict["text"]
    assert "rank 1 of 3 failed" in ended.err


@pytest.mark.alone
def test_an_echo_without_a_cause_is_the_failure_within_two_seconds(bench: Bench) -> None:
    ended = bench(
        HAND + "if rank == 0: raise ConnectionResetError('Connection reset by peer')\nhear()", workers=3
    )
    assert ended.seconds < 3
    [verdict] = verdicts(ended.run)
    assert (verdict["kind"], verdict["ranks"]) == ("rank-failed", [0])
    assert ended.out.count("alarm rank-failed") == 2


def test_a_rank_that_ended_well_is_missed(bench: Bench) -> None:
    ended = bench(HAND + "if rank: call('barrier', [])", workers=3)
    assert ended.code == 1
    [verdict] = verdicts(ended.run)
    assert (verdict["kind"], verdict["ranks"]) == ("subset-call", [1, 2])
    assert "rank 0: ended by itself with exit code 0" in ended.err
    assert "ranks 1 and 2: told by the guard, and ended" in ended.err


STACKS = {
    "sleeping": "time.sleep(600)",
    "spinning": "while True: pass",
    "in a C call that keeps the lock": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "in a C call that gives the lock up": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
    "importing": "import slow",
}


@pytest.mark.parametrize("what", STACKS)
def test_the_stack_of_a_late_rank_is_taken_without_its_help(bench: Bench, what: str) -> None:
    (bench.folder / "slow.py").write_text("import time\ntime.sleep(600)\n")
    line = STACKS[what]
    path = bench.script(HAND + f"def busy():\n    {line}\nif rank == 1: busy()\ncall('allreduce', [3])")
    at = path.read_text().splitlines().index(f"    {line}") + 1
    process = bench.start("-n", "2", "--stall-after", "0.3", str(path))
    bench.wait_for(lambda: (bench.run_dir / "run.json").exists() and verdicts(bench.run_dir))
    process.terminate()
    _, err = process.communicate(timeout=20)
    [verdict] = verdicts(bench.run_dir)
    assert (verdict["kind"], verdict["ranks"]) == ("late-rank", [1])
    assert f"busy ({path}:{at})" in verdict["text"]
    where = verdict["where"].rpartition("/")[2]
    assert where == ("slow.py:2" if what == "importing" else f"job.py:{at}")
    assert err.count("A rank keeps the others waiting") == 1


def test_a_wait_that_is_too_long_ends_the_job(bench: Bench) -> None:
    ended = bench(
        HAND + "if rank == 1: time.sleep(600)\ncall('allreduce', [3])",
        *("--stall-after", "0.3", "--stall-abort", "0.6"),
    )
    assert ended.code == 1
    [verdict] = verdicts(ended.run)
    assert "The job is stopped after 0.6 s (--stall-abort)." in verdict["text"]
    last = "hora: Rank 1 still keeps the others waiting. The job is stopped after 0.6 s (--stall-abort)."
    assert ended.err.splitlines().count(last) == 1
    assert "rank 0: told by the guard, and ended" in ended.err
    assert "rank 1: stopped by hora" in ended.err
    assert ended.err.count("A rank keeps the others waiting") == 1


def test_a_stopped_rank_is_called_stopped_and_ends_on_sigterm(bench: Bench) -> None:
    ended = bench(
        HAND + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ncall('allreduce', [3])",
        *("--stall-after", "0.3", "--stall-abort", "0.6"),
    )
    assert all("it is stopped (SIGSTOP)" in verdict["text"] for verdict in verdicts(ended.run))
    assert ended.err.splitlines()[-2] == "  rank 1: stopped by hora"
    assert ended.seconds < 6


def test_a_rank_that_has_become_another_program_is_not_killed_for_its_stack(bench: Bench) -> None:
    ended = bench(
        HAND + "if rank == 1: os.execvp('sleep', ['sleep', '3'])\ncall('allreduce', [3])",
        *("--stall-after", "0.3"),
    )
    late = verdicts(ended.run)[0]
    assert late["kind"] == "late-rank"
    assert "it runs sleep, no Python program" in late["text"]
    assert [verdict["kind"] for verdict in verdicts(ended.run)] == ["late-rank", "subset-call"]


def test_a_rank_that_reuses_the_number_of_the_stack_pipe_keeps_its_file(bench: Bench) -> None:
    ended = bench(
        HAND
        + """
if rank == 1:
    os.closerange(3, 200)
    for name in range(100): os.open(f"mine-{name}", os.O_WRONLY | os.O_CREAT)
    time.sleep(1.5)
    sys.exit(5)
call('allreduce', [3])
""",
        *("--stall-after", "0.3"),
    )
    assert ended.code == 5
    assert "it has closed the descriptors that it got from Hora" in verdicts(ended.run)[0]["text"]
    assert all(path.stat().st_size == 0 for path in bench.folder.glob("mine-*"))


def test_the_signal_for_the_stack_leaves_a_rank_unharmed(bench: Bench) -> None:
    ended = bench(
        HAND
        + """
if rank == 1:
    import select
    began = time.monotonic()
    select.select([], [], [], 1.0)
    assert time.monotonic() - began > 0.9
call('allreduce', [3])
print('done')
""",
        *("--stall-after", "0.3"),
    )
    assert ended.code == 0
    assert ended.out.count("done") == 2
    assert [verdict["kind"] for verdict in verdicts(ended.run)] == ["late-rank"]


GARBAGE = f"""
garbage = [
    os.urandom(100_000) + b"\\n",
    b"[1, 2]\\n",
    b"[" * 100_000 + b"\\n",
    b"x" * {LONGEST_RECORD + 1_000_000} + b"\\n",
    b'{{"kind": "set", "set": 1, "members": [7]}}\\n',
]
harmless = [b"\\n\\n\\n", json.dumps({{"kind": "x" * 1_000_000}}).encode() + b"\\n", b"{{", b"}}", b"\\n"]
"""


def test_whatever_a_rank_sends_the_job_goes_on_and_the_guard_too(bench: Bench) -> None:
    ended = bench(HAND + GARBAGE + "link.sendall(garbage[rank])\ncall('allreduce', [rank == 3])", workers=5)
    [verdict] = verdicts(ended.run)
    assert (verdict["kind"], verdict["ranks"]) == ("mismatched-calls", [3])
    for rank in range(4):
        assert ended.err.count(f"hora: rank {rank} sends the guard") == 1
    assert ended.err.count("hora: the guard cannot read a record of rank 4") == 1
    assert "fault" not in ended.err


def test_records_that_mean_nothing_are_passed_over(bench: Bench) -> None:
    ended = bench(HAND + GARBAGE + "for piece in harmless: link.sendall(piece)\ncall('allreduce', [rank])")
    assert [verdict["kind"] for verdict in verdicts(ended.run)] == ["mismatched-calls"]
    assert "sends the guard" not in ended.err
    assert "cannot read" not in ended.err


def test_a_closed_socket_is_a_rank_unheard_not_a_failure(bench: Bench) -> None:
    ended = bench(
        HAND
        + """
if rank == 1:
    slot.enter(0, 1, 1, zlib.crc32(b'[1]'))
    link.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
else:
    call('allreduce', [1])  # cleared, although what rank 1 calls cannot be known
print("on")
"""
    )
    assert ended.code == 0
    assert ended.out.count("on") == 2


def test_a_record_without_its_end_is_not_taken(bench: Bench) -> None:
    ended = bench(HAND + "link.sendall(b'{\"kind\": \"check\"')\nprint('on')")
    assert ended.code == 0
    assert "fault" not in ended.err


def test_a_stopped_rank_that_reads_nothing_costs_its_link_alone(tmp_path: Path) -> None:
    import socket

    from hora.launch._link import Link
    from hora.launch._loop import Loop

    ours, theirs = socket.socketpair()
    loop = Loop()
    complaints: list[str] = []
    closed: list[bool] = []
    link = Link(
        ours,
        loop,
        receive=lambda record: None,
        complain=complaints.append,
        closed=lambda: closed.append(True),
    )
    record = {"text": "x" * 10_000}
    for _ in range(2 * MOST_WAITING // 10_000):
        link.send(record)
        assert len(link._going) <= MOST_WAITING + 20_000
    assert len(complaints) == 1
    assert closed == [True]
    theirs.close()
    loop.close()


def test_records_wait_for_a_rank_that_reads_slowly() -> None:
    import socket

    from hora.launch._link import Link
    from hora.launch._loop import Loop

    ours, theirs = socket.socketpair()
    loop = Loop()
    link = Link(ours, loop, receive=lambda record: None, complain=pytest.fail, closed=lambda: None)
    for number in range(200):
        link.send({"number": number, "text": "x" * 10_000})
    theirs.setblocking(False)
    data = b""
    while True:
        with pytest.raises(BlockingIOError):
            while True:
                data += theirs.recv(1 << 16)
        if data.count(b"\n") == 200:
            break
        loop.turn()  # there is room now, and more to come
    assert [json.loads(line)["number"] for line in data.splitlines()] == list(range(200))
    link.close()
    theirs.close()
    loop.close()


def test_without_the_guard_there_is_nothing_of_it(bench: Bench) -> None:
    ended = bench(
        "print(sorted(key for key in os.environ if 'GUARD' in key))\nif rank: sys.exit(3)", "--guard", "off"
    )
    assert ended.code == 3
    assert ended.out.count("['HORA_GUARD']") == 2
    assert not (ended.run / "verdicts.jsonl").exists()


def test_the_flags_are_the_ranks_settings(bench: Bench) -> None:
    ended = bench(
        "print(*(os.environ[key] for key in ('HORA_GUARD', 'HORA_STALL_AFTER', 'HORA_STALL_ABORT')))",
        *("--guard", "strict", "--stall-after", "7", "--stall-abort", "1e3"),
        workers=1,
    )
    assert ended.out == "[0] strict 7.0 1000.0\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--guard", "perhaps"], "choose from"),
        (
            ["--stall-after", "soon"],
            "--stall-after soon: that is not a number of seconds.",
        ),
        (["--stall-abort", "0"], "--stall-abort 0: that is not a positive number"),
        (["--stall-abort", "inf"], "not a positive number"),
    ],
)
def test_wrong_flags(bench: Bench, words: list[str], message: str) -> None:
    ended = bench("pass", *words)
    assert ended.code == 2
    assert message in ended.err
    assert not ended.run.exists()


def test_a_verdict_that_no_disk_takes_is_shown_all_the_same(bench: Bench) -> None:
    ended = bench(
        HAND
        + """
if rank == 0: os.mkdir(os.path.join(os.environ["HORA_RUN_DIR"], "verdicts.jsonl"))  # as good as a full disk
call("barrier", [0])
call("allreduce", [rank], 2)
"""
    )
    assert ended.code == 1
    assert ended.err.count("The ranks call different collectives.") == 1
    assert "hora: a verdict is not written down: " in ended.err
    assert "told by the guard" in ended.err


def test_quiet_shows_verdicts_but_no_plan(bench: Bench) -> None:
    body = HAND + "call('allreduce', [rank])"
    assert "The ranks call different collectives." in bench(body, "--quiet").err


def test_ctrl_c_while_ranks_wait_is_an_interruption_not_a_verdict(bench: Bench) -> None:
    path = bench.script(HAND + "open(f'ready-{rank}', 'w').close()\nif rank: time.sleep(60)\ncall('a', [])")
    process = bench.start("-n", "2", str(path))
    bench.wait_for(lambda: len(list(bench.folder.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in err
    assert verdicts(bench.run_dir) == []


def test_timeout_while_ranks_wait(bench: Bench) -> None:
    ended = bench(HAND + "if rank: time.sleep(60)\ncall('a', [])", "--timeout", "1")
    assert ended.code == 124
    assert verdicts(ended.run) == []


def test_sigkill_to_the_launcher_ends_ranks_that_wait_for_its_word(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = bench.folder.name
    path = bench.script(HAND + "open(f'ready-{rank}', 'w').close()\nif rank: time.sleep(60)\ncall('a', [])")
    process = bench.start("-n", "2", str(path))
    bench.wait_for(lambda: len(list(bench.folder.glob("ready-*"))) == 2)
    process.kill()
    process.wait()
    bench.wait_for(lambda: not bench.marked(bench.folder.name), seconds=5.0)


def test_sixty_four_ranks(bench: Bench) -> None:
    ended = bench(HAND + "call('barrier', [])\ncall('allreduce', [rank == 40], 2)", workers=64)
    [verdict] = verdicts(ended.run)
    assert (verdict["kind"], verdict["ranks"]) == ("mismatched-calls", [40])
    assert "  ranks 0 to 63: told by the guard, and ended" in ended.err.splitlines()
    assert ended.out.count("alarm") == 64


def test_a_function_that_is_stopped_raises_with_the_whole_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    code = "import os, sys, time\nrank = int(os.environ['HORA_RANK'])\n" + HAND + "call('allreduce', [rank])"
    with pytest.raises(JobFailedError) as caught:
        hora.run(exec, (code, {}), workers=2, run_dir=tmp_path / "run")
    report = caught.value.report
    assert report.startswith("hora: The ranks call different collectives.")
    assert "hora: job stopped by the verdict mismatched-calls (above)" in report
    assert "different collectives" not in capfd.readouterr().err


def test_a_fault_of_the_guard_is_told_and_ends_the_guard_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hora.guard.judge import Judge

    def broken(self: Judge, now: float | None = None) -> float:
        raise LookupError("lost")

    monkeypatch.setattr(Judge, "tick", broken)
    script = tmp_path / "job.py"
    script.write_text("import time\ntime.sleep(1)\n")
    result = run_job(Job(target=ScriptTarget(str(script)), workers=2, run_dir=tmp_path / "run"))
    assert result.exit_code == 0
    err = capfd.readouterr().err
    assert err.count("the guard has a fault and watches no more; the job goes on (LookupError: lost at") == 1


def test_an_idle_job_costs_the_supervisor_next_to_nothing(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import time\ntime.sleep(2)\n")
    spent = {}
    for mode in ("off", "on"):
        env = {"HORA_GUARD": mode}
        job = Job(target=ScriptTarget(str(script)), workers=2, run_dir=tmp_path / mode, env=env)
        began = resource.getrusage(resource.RUSAGE_THREAD)
        run_job(job)
        ended = resource.getrusage(resource.RUSAGE_THREAD)
        spent[mode] = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    assert spent["on"] - spent["off"] < 0.02  # 1 % of the two seconds


def test_a_job_that_is_ended_before_a_verdict_is_due_says_who_waited(bench: Bench) -> None:
    ended = bench(HAND + "if rank == 1: time.sleep(60)\ncall('allreduce', [3])", "--timeout", "3")
    assert ended.code == 124
    first, second = ended.err.splitlines()[-2:]
    assert first == "hora: stopped after its timeout of 3 s; 2 workers stopped."
    assert re.fullmatch(
        r"  Rank 0 had been waiting for [123] s in allreduce at train\.py:7, and rank 1 had not come\.",
        second,
    )
    assert verdicts(ended.run) == []


def test_a_judge_that_was_kept_from_working_looks_again_soon(tmp_path: Path) -> None:
    """On a busy host a look may take long, though it is little work: that is no reason to rest for long."""
    job = Job(target=ScriptTarget("job.py"), run_dir=tmp_path / "run")
    loop = Loop()
    guard = Guard(
        job,
        RunDirectory.create(tmp_path / "run"),
        loop,
        say=lambda _: None,
        alarmed=lambda _: None,
        announce=False,
    )
    judge = guard._judge
    assert judge is not None

    def held_up(now: float | None = None) -> float:
        time.sleep(0.5)
        return judge.SOON

    judge.tick = held_up  # type: ignore[method-assign]
    guard._tick()
    assert guard._ticks.at is not None
    assert guard._ticks.at - time.monotonic() < 0.5  # a rest as for work would be 2 s
    guard.close()
    loop.close()

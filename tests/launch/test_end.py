"""How jobs end: exit codes, signals, the first failure among several, and the report."""

from __future__ import annotations

import json
import re
import signal

import pytest
from tests.launch.conftest import Bench


def test_success_is_zero_and_leaves_a_complete_run_directory(bench: Bench) -> None:
    ended = bench("print('hello', sys.argv[1:])", arguments=("--lr", "0.1", "--", "-n", "3"))
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [
        f"[{rank}] hello ['--lr', '0.1', '--', '-n', '3']" for rank in (0, 1)
    ]
    assert ended.log(1) == "hello ['--lr', '0.1', '--', '-n', '3']\n"
    about = json.loads((ended.run / "run.json").read_text())
    assert about["workers"] == 2
    assert about["command"][1:] == ["--lr", "0.1", "--", "-n", "3"]
    assert about["exit_code"] == 0
    assert about["failure"] is None
    assert about["start"] <= about["ended"]


def test_environment_of_a_rank(bench: Bench) -> None:
    names = (
        "HORA_RANK HORA_SIZE HORA_LOCAL_RANK HORA_LOCAL_SIZE HORA_HOST_INDEX HORA_HOST_COUNT RANK WORLD_SIZE "
    )
    names += "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR COLOUR PYTHONUNBUFFERED"
    ended = bench(
        f"""
        print(rank, *(os.environ[name] for name in {names.split()!r}))
        store, master = os.environ["HORA_STORE"], os.environ["MASTER_PORT"]
        assert store.startswith("tcp://127.0.0.1:") and not store.endswith(":" + master)
        assert os.environ["HORA_RUN_DIR"] == {str(bench.run_dir)!r}
        assert len(os.environ["HORA_JOB"]) == 32
        assert ("HORA_STORE_FD" in os.environ) == ("HORA_STATUS_FD" in os.environ) == (rank == 0)
        """,
        *("--env", "COLOUR=blue=green"),
        workers=3,
    )
    assert ended.code == 0, ended.err
    want = [
        f"[{rank}] {rank} {rank} 3 {rank} 3 0 1 {rank} 3 {rank} 3 0 1 127.0.0.1 blue=green 1"
        for rank in range(3)
    ]
    assert sorted(ended.out.splitlines()) == want


def test_store_socket_listens_in_rank_0_alone_and_nothing_else_leaks(bench: Bench) -> None:
    ended = bench(
        """
        import socket
        kinds = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in os.listdir("/proc/self/fd")
                 if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
        print(sorted(kind for kind in kinds if not kind.startswith("/proc")))
        if rank == 0:
            listening = socket.socket(fileno=int(os.environ["HORA_STORE_FD"]))
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            assert os.environ["HORA_STORE"].endswith(f":{listening.getsockname()[1]}")
            with socket.create_connection(listening.getsockname()):
                listening.accept()[0].close()
        """
    )
    assert ended.code == 0, ended.err
    # Each rank: failure pipe, stack pipe, guard's socket, board. Rank 0 also: store socket, status pipe.
    assert sorted(ended.out.splitlines()) == [
        "[0] ['/memfd', 'pipe', 'pipe', 'pipe', 'socket', 'socket']",
        "[1] ['/memfd', 'pipe', 'pipe', 'socket']",
    ]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("if rank == 1: raise ValueError('bad thing')", 1, ["ValueError", "ValueError: bad thing", "job.py"]),
        ("if rank == 1: sys.exit(3)", 3, ["exit code 3", "job.py:3"]),
        ("if rank == 1: os._exit(3)", 3, ["exit code 3"]),
        ("if rank == 1: sys.exit('no data here')", 1, ["no data here"]),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            ["SIGSEGV", "segmentation fault", "job.py"],
        ),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 137, ["SIGKILL", "killed from outside"]),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGTERM)", 143, ["SIGTERM"]),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGINT)", 130, ["SIGINT"]),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGRTMIN)", 162, ["SIGRTMIN"]),
        ("if rank == 1: (", 1, []),
    ],
)
def test_exit_code_is_that_of_the_failing_rank(bench: Bench, body: str, code: int, words: list[str]) -> None:
    if body.endswith("("):
        ended = bench(body)
        assert "SyntaxError" in ended.err
        assert "all 2 ranks" in ended.err
    else:
        ended = bench(body)
        assert "rank 1 of 2 failed on " in ended.err
        assert "rank 0: ended by itself with exit code 0" in ended.err
    assert ended.code == code
    assert all(word in ended.err for word in words), ended.err
    assert ended.seconds < 20
    report = ended.err[ended.err.index(" failed on ") :]
    assert "_worker.py" not in report
    assert "runpy" not in ended.err
    assert ended.err.rstrip().splitlines()[-1].startswith("  log: ")
    assert ended.err.count("Traceback") <= 1


WAIT = """
def wait_for_failure_of(other):
    path = os.path.join(os.environ["HORA_RUN_DIR"], "failures", f"rank-{other}.json")
    while not os.path.exists(path):
        time.sleep(0.01)

"""


def test_an_echo_never_wins_though_it_came_first(bench: Bench) -> None:
    ended = bench(
        WAIT
        + """
if rank == 0:
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:99")
if rank == 1:
    wait_for_failure_of(0)
    wait_for_failure_of(2)
    raise KeyError("the real one")
if rank == 2:
    raise ConnectionResetError(104, "Connection reset by peer")
time.sleep(60)
""",
        workers=4,
    )
    assert ended.code == 1
    assert "rank 1 of 4 failed" in ended.err
    assert "KeyError: 'the real one'" in ended.err
    assert "rank 0: echo: connection to rank 1 lost" in ended.err
    assert "rank 2: echo: connection to rank 1 lost" in ended.err
    assert "rank 3: stopped by hora" in ended.err
    assert "pair.cc" not in ended.err
    assert "pair.cc" in ended.log(0)  # the logs have it all


def test_what_came_through_a_callback_of_torch_is_an_echo_too(bench: Bench) -> None:
    ended = bench(
        WAIT
        + """
if rank == 0:
    raise RuntimeError("Got the following error when running the callback: DistBackendError: Rank 1 ended")
wait_for_failure_of(0)
raise KeyError("the real one")
"""
    )
    assert "rank 1 of 2 failed" in ended.err
    assert "rank 0: echo: connection to rank 1 lost" in ended.err


def test_death_by_signal_wins_over_the_echoes_of_it(bench: Bench) -> None:
    ended = bench(
        WAIT
        + """
if rank == 0:
    try:
        raise ConnectionResetError("Connection reset by peer")
    except ConnectionResetError as error:
        raise RuntimeError("training failed") from error
wait_for_failure_of(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert ended.code == 137
    assert "rank 1 of 2 failed" in ended.err
    assert "rank 0: echo" in ended.err


def test_a_connection_to_a_child_of_the_rank_is_no_echo(bench: Bench) -> None:
    ended = bench(
        WAIT
        + """
if rank == 0:
    from multiprocessing import Pipe
    ours, theirs = Pipe()
    theirs.close()
    try:
        ours.send(1)
    except BrokenPipeError as error:
        raise RuntimeError("DataLoader worker exited") from error
wait_for_failure_of(0)
raise ConnectionResetError("Connection reset by peer")
"""
    )
    assert ended.code == 1
    assert "RuntimeError: DataLoader worker exited" in ended.err
    assert "rank 1: echo" in ended.err


def test_a_loader_worker_that_was_killed_is_named_where_only_its_connection_is_seen(bench: Bench) -> None:
    ended = bench(
        WAIT
        + """
import multiprocessing
multiprocessing.set_start_method("fork")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class _MultiProcessingDataLoaderIter:  # as torch's, without torch
    def __init__(self):
        self.ours, theirs = multiprocessing.Pipe()
        self._workers = [multiprocessing.Process(target=die)]
        for worker in self._workers: worker.start()
        theirs.close()

    def next(self):
        return self.ours.recv()

if rank == 0:
    loader = _MultiProcessingDataLoaderIter()
    print("pid", loader._workers[0].pid)
    loader.next()
wait_for_failure_of(0)
raise ConnectionResetError("Connection reset by peer")
"""
    )
    pid = re.search(r"pid (\d+)", ended.out)
    assert pid is not None
    assert f"Loader worker (pid {pid[1]}) of rank 0 was killed by SIGKILL." in ended.err
    assert "rank 0 of 2 failed" in ended.err
    assert "rank 1: echo" in ended.err


def test_a_handler_that_raises_while_a_failure_is_recorded_hides_nothing(bench: Bench) -> None:
    ended = bench(
        """
def handler(*_): raise RuntimeError("a child has ended")
signal.signal(signal.SIGCHLD, handler)
sent = []

class Odd(Exception):
    @property
    def __class__(self):  # looked at by who records it
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGCHLD)
        return Odd

if rank == 0:
    raise Odd("the real one")
time.sleep(60)
"""
    )
    assert ended.code == 1
    assert "rank 0 of 2 failed" in ended.err
    assert "Odd: the real one" in ended.err
    assert (ended.run / "failures" / "rank-0.json").exists()


def test_without_anything_better_an_echo_is_the_failure(bench: Bench) -> None:
    ended = bench("if rank == 0: raise ConnectionResetError('Connection reset by peer')")
    assert ended.code == 1
    assert "rank 0 of 2 failed" in ended.err
    assert "ConnectionResetError" in ended.err
    assert "rank 1: ended by itself with exit code 0" in ended.err


def test_the_earlier_of_two_real_failures_wins(bench: Bench) -> None:
    ended = bench(WAIT + "if rank == 0: wait_for_failure_of(1)\nraise ValueError(f'number {rank + 5}')")
    assert "rank 1 of 2 failed" in ended.err
    assert "ValueError: number 6" in ended.err
    assert "rank 0: ended by itself: ValueError, exit code 1: number 5" in ended.err


def test_the_same_error_everywhere_is_said_once(bench: Bench) -> None:
    ended = bench("raise FileNotFoundError(f'no data for rank {rank}')", workers=4)
    assert "all 4 ranks failed" in ended.err
    assert ended.err.count("FileNotFoundError: no data") == 1


def test_a_hora_error_shows_its_message_and_the_users_line_without_a_traceback(bench: Bench) -> None:
    ended = bench(
        """
        from hora.core.errors import GlobalBatchError
        raise GlobalBatchError("global_batch=250 does not divide among 4 workers.", fix="Use 248 or 252.")
        """
    )
    assert ended.code == 1
    assert "Traceback" not in ended.err
    lines = [line.strip() for line in ended.err.splitlines()]
    at = lines.index("global_batch=250 does not divide among 4 workers.")
    assert lines[at + 1] == "Use 248 or 252."
    assert "job.py:5: raise GlobalBatchError(" in lines[at + 2]
    assert lines[at + 3] == "more: hora explain global-batch"


def test_causes_stay_in_the_traceback_and_the_log_has_it(bench: Bench) -> None:
    ended = bench(
        """
        def load():
            raise OSError("disk gone")
        try:
            load()
        except OSError as error:
            raise RuntimeError("no data") from error
        """,
        workers=1,
    )
    assert "OSError: disk gone" in ended.err
    assert "direct cause" in ended.err
    assert "in load" in ended.err
    assert "RuntimeError: no data" in ended.log(0)


def test_a_rank_that_hangs_on_its_way_out_is_still_the_failure_with_its_code(bench: Bench) -> None:
    ended = bench(
        """
        import threading
        if rank == 0:
            threading.Thread(target=time.sleep, args=(60,)).start()
            sys.exit(3)
        time.sleep(60)
        """
    )
    assert ended.code == 3
    assert "rank 0 of 2 failed" in ended.err
    assert "exit code 3" in ended.err
    assert "rank 1: stopped by hora" in ended.err
    assert ended.seconds < 15


def test_torch_tells_its_traceback_once_and_its_gloo_errors_are_echoes(bench: Bench) -> None:
    ended = bench(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise ValueError("in the middle")
        dist.all_reduce(torch.ones(1))
        """
    )
    assert ended.code == 1
    assert "rank 1 of 2 failed" in ended.err
    assert ended.err.count("ValueError: in the middle") == 1
    # On a busy host rank 0 may not have got round to it when it was stopped.
    assert re.search("rank 0: (echo: connection to rank 1 lost|stopped by hora)", ended.err)
    assert ended.err.count("Traceback") == 1


def test_a_rank_that_ignores_sigterm_is_killed(bench: Bench) -> None:
    ended = bench(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("ready", "w").close()
            time.sleep(60)
        while not os.path.exists("ready"): time.sleep(0.01)
        sys.exit(5)
        """
    )
    assert ended.code == 5
    assert "rank 0: stopped by hora (SIGKILL, it did not end on SIGTERM)" in ended.err
    assert 3 < ended.seconds < 20


def test_a_rank_that_ends_well_does_not_stop_the_others(bench: Bench) -> None:
    ended = bench("time.sleep(rank * 0.5); print('done')")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 2


def test_exit_codes_survive_a_launcher_that_was_started_with_sigchld_ignored(bench: Bench) -> None:
    path = bench.script("sys.exit(3)")
    ended = bench.run(str(path), preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert ended.code == 3


def test_ranks_that_close_all_their_descriptors_go_on(bench: Bench) -> None:
    ended = bench("os.closerange(3, 100); time.sleep(0.3); print('on')")
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["[0] on", "[1] on"]


def test_timeout(bench: Bench) -> None:
    ended = bench("time.sleep(60)", "--timeout", "0.5")
    assert ended.code == 124
    assert ended.err.splitlines()[-1] == "hora: stopped after its timeout of 0.5 s; 2 workers stopped."


def test_exception_in_a_forked_child_is_not_the_ranks_failure(bench: Bench) -> None:
    ended = bench(
        """
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        os.waitpid(pid, 0)
        """,
        workers=1,
    )
    assert ended.code == 0
    assert "ValueError: in the child" in ended.err


def test_the_users_own_excepthook_is_called(bench: Bench) -> None:
    ended = bench(
        "sys.excepthook = lambda *a: print('my hook', a[0].__name__)\nraise ValueError('x')", workers=1
    )
    assert ended.out == "[0] my hook ValueError\n"
    assert ended.code == 1


def test_multiprocessing_spawn_works_inside_a_rank(bench: Bench) -> None:
    ended = bench(
        """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]))
        """,
        workers=1,
    )
    assert ended.out == "[0] [4, 9]\n", ended.err
    assert ended.code == 0


def test_a_failure_keeps_its_exit_code_although_an_engine_would_abort_at_exit(bench: Bench) -> None:
    ended = bench(
        """
        import atexit, ctypes
        atexit.register(print, "said at exit", flush=True)
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)  # as C++ tears down statics
        raise SystemExit(3)
        """,
        workers=1,
    )
    assert ended.code == 3
    assert "said at exit" in ended.out
    assert "SIGABRT" not in ended.err


def test_a_huge_message_is_cut_in_the_report_and_whole_in_the_log(bench: Bench) -> None:
    ended = bench("raise ValueError('x' * 100_000)", workers=1)
    assert "x ... (98,012 more characters in the log)" in ended.err
    assert len(ended.err) < 5000
    assert "x" * 100_000 in ended.log(0)


def test_a_failure_is_told_whole_although_the_disk_cannot_take_its_record(bench: Bench) -> None:
    ended = bench(
        """
        if rank == 1:
            os.rmdir(os.path.join(os.environ["HORA_RUN_DIR"], "failures"))  # as good as a full disk
            raise ValueError("lost 🏖 at sea")
        time.sleep(600)
        """
    )
    assert ended.code == 1
    assert "rank 1 of 2 failed" in ended.err
    assert "ValueError: lost 🏖 at sea" in ended.err
    assert ended.err.count("Traceback") == 1
    assert "cannot be written" not in ended.err


def test_a_horovod_script_without_the_flag_is_told_about_it(bench: Bench) -> None:
    ended = bench("import horovod.torch as hvd", workers=1)
    assert ended.code == 1
    assert "run with: hora run --horovod" in ended.err

"""Elastic jobs on several hosts: agents start the workers there.

But for the one that cuts the network, "hosts" are names for this one, and ``env`` is the remote shell.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch.conftest import Bench
from tests.launch.test_elastic import WORKER

from _two_hosts import NoNamespacesError, two_hosts
from hora.core.version import VERSION
from hora.launch import _agent_start, _network
from hora.launch._channel import HEAD, MARK
from hora.launch._elastic_workers import Worker, may_go, places_of
from hora.launch._network import Address, choose
from hora.launch._remote_shell import is_host
from host_cut import cut_once

SHELL = ("--remote-shell", "env TEST_HOST={host}", "--network", "lo")


class OnHosts:
    """Runs a script of elastic workers on the hosts that a file names."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        program = bench.folder / "hosts.sh"
        program.write_text(f"#!/bin/sh\ncat {bench.folder}/hosts\n")
        program.chmod(0o755)
        bench.environ["TEST_MARK"] = str(bench.folder)
        self.options = ["--hosts-from", str(program), "--env", f"TEST_FOLDER={bench.folder}"]

    def __call__(self, hosts: str, body: str, *options: str) -> Any:
        (self.bench.folder / "hosts").write_text(hosts.replace(" ", "\n"))
        path = self.bench.script("", "job.py")
        path.write_text(path.read_text() + WORKER + HERE + textwrap.dedent(body))
        return self.bench.run(*self.options, *options, str(path))

    def worlds(self) -> list[tuple[list[int], list[str]]]:
        lines = (self.bench.run_dir / "worlds.jsonl").read_text().splitlines()
        return [(world["workers"], world["hosts"]) for world in map(json.loads, lines)]


HERE = """
host = os.environ.get("TEST_HOST", "localhost")
def hosts(text):
    (folder / "hosts").write_text(text.replace(" ", "\\n"))
"""


@pytest.fixture
def on_hosts(bench: Bench) -> OnHosts:
    return OnHosts(bench)


def test_a_life_on_two_hosts(on_hosts: OnHosts) -> None:
    ended = on_hosts(
        "localhost:1 near:2 empty:0",
        """
        def body(number, rank, size):
            commit(number)
            if number == 0:
                place = [os.environ[f"HORA_{name}"] for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")]
                print("place", host, *place, os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
                if worker == 1:
                    line = "x" * 99
                    print("\\n".join([line] * 30_000), flush=True)
                    print("warning", file=sys.stderr)
                    raise ValueError("bad sample")
                until_reset()
            elif number == 1:
                until_updated()
            elif number == 2:  # all three again, with a new worker
                if worker == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                until_reset()
            elif number == 3:
                until_updated()
            elif number == 4:
                if host == "near" and rank == size - 1:
                    os.kill(os.getppid(), signal.SIGKILL)  # the agent
                until_reset()
            elif size == 3:
                if rank == 0:
                    hosts("localhost:1 empty:0")
                    tell("shrunk")
                until_updated()
            elif not (folder / "shrunk").exists():
                until_updated()
        train(body)
        """,
        *("--min-workers", "1", "--max-workers", "3", *SHELL, "--cooldown", "0.01", "0.02"),
    )
    assert ended.code == 0, ended.err
    here, near = "localhost", "near"
    worlds = on_hosts.worlds()
    assert worlds[:4] == [
        ([0, 1, 2], [here, near, near]),
        ([0, 2], [here, near]),
        ([0, 2, 3], [here, near, near]),
        ([0, 3], [here, near]),
    ]
    assert worlds[4] == ([0, 3, 4], [here, near, near])
    assert worlds[5] == ([0], [here])
    assert worlds[-2][1] == [here, near, near]
    assert worlds[-1] == ([0], [here])
    assert "[0] place localhost 0 0 1 lo" in ended.out
    assert "[2] place near 2 1 2 lo" in ended.out
    assert ended.out.count("[1] " + "x" * 99 + "\n") == 30_000
    assert ended.log(1).count("x" * 99 + "\n") == 30_000
    assert "[1] warning" in ended.err
    assert "worker 1 (rank 1) has failed: ValueError, exit code 1; 2 workers go on" in ended.err
    assert "worker 2 (rank 1) has failed: SIGKILL (killed from outside), exit code 137" in ended.err
    assert "host near is lost with workers 3, 4: its remote shell has ended with exit code 137" in ended.err
    assert not on_hosts.bench.marked(str(on_hosts.bench.folder))


def test_all_workers_on_other_hosts_and_a_failure_there_is_reported(on_hosts: OnHosts) -> None:
    ended = on_hosts(
        "near:1 far:1",
        """
        def body(number, rank, size):
            if number < 2:
                commit(number)
            if rank == 1:
                raise ValueError("bad sample " + host)
            until_reset()
        train(body)
        """,
        *("--min-workers", "2", "--max-workers", "2", *SHELL, "--cooldown", "0.01", "0.02"),
    )
    assert ended.code == 1
    assert "given up: 3 failures without a commit in between" in ended.err
    failed = re.search(r"rank 1 of 2 failed on (near|far): ValueError, exit code 1", ended.err)
    assert failed is not None
    assert ended.err.count(f"ValueError: bad sample {failed[1]}") == 1
    assert not on_hosts.bench.marked(str(on_hosts.bench.folder))


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        (
            "sh -c 'echo ssh: Could not resolve hostname $0: Name or service not known >&2; exit 255' {host}",
            "its remote shell has ended with exit code 255: "
            "ssh: Could not resolve hostname nowhere: Name or service not known",
        ),
        ("echo Welcome to {host}", "its remote shell has ended with exit code 0: Welcome to nowhere"),
    ],
    ids=["unknown", "no-agent"],
)
def test_a_host_that_cannot_be_reached(on_hosts: OnHosts, shell: str, text: str) -> None:
    ended = on_hosts(
        "nowhere:1",
        "train(lambda *_: None)",
        *("--min-workers", "1", "--elastic-timeout", "2", "--remote-shell", shell),
    )
    assert ended.code == 1
    lines = ended.err.splitlines()
    told = [line for line in lines if line.startswith("hora: host nowhere")]
    assert len(told) == 1
    assert told[0].startswith(
        "hora: host nowhere is not used now, and tried again every few seconds: its rem"
    )
    assert any("came within 2 s; host nowhere: " in line and text in line for line in lines), ended.err


def test_what_cannot_work_is_said_at_once(on_hosts: OnHosts) -> None:
    for options, text in (
        (("--remote-shell", "no-such-shell {host}"), "there is no program 'no-such-shell'"),
        (("--network", "10.0.0.0/99"), "HORA_NETWORK='10.0.0.0/99' is no network"),
    ):
        ended = on_hosts("near:1", "", "--min-workers", "1", *options)
        assert ended.code != 0
        assert text in ended.err
    ended = on_hosts.bench.run("--network", "lo", str(on_hosts.bench.script("")))
    assert "--network is about other hosts, and this job has none" in ended.err


GUARDED = """
from hora.core.elastic import control
from hora.core.settings import load
from hora.guard.call import Call
from hora.guard.reporter import Reporter

settings = load()
link, host = control(settings), os.environ.get("TEST_HOST", "localhost")

def oversleep():
    time.sleep(60)

prepared = False
while True:
    member = link.join(settings, prepared=prepared, commits=0, repeats=0)
    prepared = True
    if member is None:
        continue
    place, mine = member.place, member.settings
    reporter = Reporter(mine.guard_fd, mine.guard_board, rank=place.rank, size=place.size)
    os.close(mine.guard_board)
    reporter.running()
    link.tell("running", number=member.number)
    call = lambda: Call({"collective": "allreduce"}, "allreduce", "job.py:1", None, ())
    one = reporter.enter("one", call, set_id=0, members=range(place.size))  # cleared when both are there
    if member.number:
        link.finish()
        break
    if host == "near":
        oversleep()
    two = reporter.enter("two", call, set_id=0, members=range(place.size), check=False)
    reporter.wait_begins(two)
    assert link.reset_due(20) is not None
    reporter.close()
"""


@pytest.mark.alone
def test_the_guard_names_a_late_rank_on_another_host(on_hosts: OnHosts) -> None:
    """Its checks, its board and its stacks come over; then the rank is killed and replaced."""
    bench = on_hosts.bench
    (bench.folder / "hosts").write_text("localhost:1\nnear:1\n")
    path = bench.script("", "job.py")
    path.write_text(path.read_text() + GUARDED)
    flags = ("--min-workers", "2", "--max-workers", "2", "--stall-after", "0.5", "--stall-abort", "2")
    ended = bench.run(*on_hosts.options, *flags, *SHELL, str(path))
    assert ended.code == 0, ended.err
    lines = (bench.run_dir / "verdicts.jsonl").read_text().splitlines()
    verdict = json.loads(lines[0])
    assert (verdict["kind"], verdict["hosts"]) == ("late-rank", ["near"])
    line = path.read_text().splitlines().index("    time.sleep(60)") + 1
    assert verdict["where"].endswith(f"job.py:{line}")
    assert "oversleep" in verdict["text"]
    waited = re.search(r"waiting for (\d+) s", verdict["text"])
    assert waited is not None
    assert int(waited[1]) <= 3
    assert len(on_hosts.worlds()) == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_is_stopped_or_killed(on_hosts: OnHosts, how: signal.Signals) -> None:
    bench = on_hosts.bench
    (bench.folder / "hosts").write_text("localhost:1\nnear:1\n")
    path = bench.script("", "job.py")
    sleeping = "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    path.write_text(
        path.read_text() + WORKER + sleeping + "train(lambda *_: (tell(f'in-{worker}'), time.sleep(60)))\n"
    )
    flags = ("--min-workers", "2", "--max-workers", "2")
    process = bench.start(*on_hosts.options, *flags, *SHELL, str(path))
    bench.wait_for(lambda: (bench.folder / "in-0").exists() and (bench.folder / "in-1").exists(), 20)
    assert len(bench.marked(str(bench.folder))) >= 6
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == (130 if how == signal.SIGINT else -9), err
    bench.wait_for(lambda: not bench.marked(str(bench.folder)))


@pytest.mark.alone
def test_a_console_that_is_not_read_loses_no_host(bench: Bench) -> None:
    """The launcher waits for its reader, for longer than a host may be silent."""
    body = "print('\\n'.join(['y' * 99] * 20_000))\n"
    path = bench.script(body)
    bench.environ["HORA_HOST_SILENCE"] = "1"
    process = bench.start("--hosts", "near:1", *SHELL, str(path))
    log = bench.run_dir / "logs" / "rank-0.log"
    bench.wait_for(lambda: log.exists() and log.stat().st_size > 0)
    time.sleep(2.5)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out.count("[0] " + "y" * 99 + "\n") == 20_000


# --- a fixed number of workers --------------------------------------------------------------------

FIXED = """
host = os.environ.get("TEST_HOST", "localhost")
names = [*("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "HOST_INDEX", "HOST_COUNT")]
place = [os.environ["HORA_" + name] for name in names]
theirs = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
assert theirs == place[:4], (theirs, place)
assert ("HORA_STORE_FD" in os.environ) == (rank == 0)
print("at", host, *place, os.environ["HORA_STORE"].rpartition(":")[0], os.environ["MASTER_ADDR"], flush=True)
"""


@pytest.mark.parametrize("first", ["localhost:1,near:2", "near:2,localhost:1,far:7"])
def test_a_fixed_number_of_workers_on_several_hosts(bench: Bench, first: str) -> None:
    """Rank 2 of the second host fails in the first case; nobody does in the second."""
    bench.environ["TEST_MARK"] = str(bench.folder)
    wanted = ("-n", "4") if "far" in first else ()
    path = bench.script(FIXED)
    if "far" not in first:
        tail = "if rank == 2:\n    raise ValueError('bad sample')\ntime.sleep(20)\n"
        path.write_text(path.read_text() + tail)
    ended = bench.run("--hosts", first, *wanted, *SHELL, str(path))
    if "far" in first:
        assert ended.code == 0, ended.err
        assert sorted(ended.out.splitlines()) == [
            "[0] at near 0 4 0 2 0 3 tcp://127.0.0.1 127.0.0.1",
            "[1] at near 1 4 1 2 0 3 tcp://127.0.0.1 127.0.0.1",
            "[2] at localhost 2 4 0 1 1 3 tcp://127.0.0.1 127.0.0.1",
            "[3] at far 3 4 0 1 2 3 tcp://127.0.0.1 127.0.0.1",
        ]
    else:
        assert ended.code == 1
        assert "rank 2 of 3 failed on near: ValueError, exit code 1" in ended.err
        assert "ValueError: bad sample" in ended.err
        assert "rank 0: stopped by hora" in ended.err
        assert ended.seconds < 15
    assert not bench.marked(str(bench.folder))


LOSES_ITS_HOST = """
if os.environ["HORA_ATTEMPT"] == "1":
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)  # the agent
    time.sleep(20)
"""


def test_a_lost_host_fails_a_job_that_is_not_elastic_and_restarts_start_it_again(bench: Bench) -> None:
    bench.environ["TEST_MARK"] = str(bench.folder)
    path = bench.script("")
    path.write_text(path.read_text() + LOSES_ITS_HOST)
    ended = bench.run("--hosts", "localhost:1,near:1", "--restarts", "1", *SHELL, str(path))
    assert ended.code == 0, ended.err
    lost = "rank 1 of 2 failed on near: its host near is lost: its remote shell has ended with exit code 137"
    assert lost in ended.err
    assert not bench.marked(str(bench.folder))


def test_hosts_that_cannot_be_used_are_said_before_anything_runs(bench: Bench) -> None:
    path = str(bench.script(""))
    for options, text in (
        (
            ("--hosts", "localhost:1,near:1", "--remote-shell", "false {host}"),
            "The host near cannot be used: its",
        ),
        (("--hosts", "near:x"), "'near:x' is not of the form host:slots"),
        (("--hosts", "localhost:1,-oProxyCommand=x:1"), "'-oProxyCommand=x:1' is not of the form host:slots"),
        (("--hosts", "near:0"), "--hosts near:0 has no slots"),
        (("--hosts", "near:2", "-n", "3"), "-n 3 workers do not fit in the 2 slots"),
        (("--hosts", "near:2", "--min-workers", "1"), "Write --hosts-from PROGRAM"),
    ):
        ended = bench.run(*options, path)
        assert ended.code == 2
        assert text in ended.err
        assert not bench.run_dir.exists()


# --- an agent alone -------------------------------------------------------------------------------


class Agent:
    """The other side of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        self.process = subprocess.Popen(
            [sys.executable, str(_agent_start.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ | {"TEST_MARK": str(folder)},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdout.read(len(MARK)) == MARK

    def send(self, kind: str, **details: Any) -> None:
        record = json.dumps({"kind": kind, **details}).encode()
        self.stdin.write(HEAD.pack(len(record), 0) + record)
        self.stdin.flush()

    def begin(self, **details: Any) -> None:
        told = {"version": VERSION, "directory": str(self.folder), "module": False, "target": "job.py"}
        told |= {
            "arguments": [],
            "env": {},
            "run": str(self.folder / "run"),
            "attempt": 1,
            "slots": 1,
            "elastic": True,
        }
        self.send("begin", **told | {"mark": "mark-of-a-test", "silence": 1.0} | details)

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind; signs of life are answered meanwhile."""
        while True:
            head = self.stdout.read(HEAD.size)
            assert head, "the agent has ended"
            length, more = HEAD.unpack(head)
            record: dict[str, Any] = json.loads(self.stdout.read(length))
            record["payload"] = self.stdout.read(more)
            if record["kind"] == kind:
                return record
            if record["kind"] == "beat":
                self.send("beat", number=record["number"])


@pytest.fixture
def agent(bench: Bench) -> Iterator[Agent]:
    bench.script("time.sleep(60)")
    agent = Agent(bench.folder)
    yield agent
    agent.process.kill()
    agent.process.wait()
    agent.stdin.close()
    agent.stdout.close()


def _start(agent: Agent) -> int:
    agent.begin()
    agent.hear("begun")
    agent.send("start", worker=0)
    pid = int(agent.hear("started")["pid"])
    assert (agent.folder / "run" / "failures").is_dir()
    return pid


def _living(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.alone
def test_an_agent_that_hears_nothing_kills_its_workers(agent: Agent, bench: Bench) -> None:
    pid = _start(agent)
    last = time.monotonic()
    bench.wait_for(lambda: not _living(pid))
    assert time.monotonic() - last < 1.5  # its limit is 1 s
    agent.process.wait(10)
    assert not bench.marked(str(bench.folder))


@pytest.mark.parametrize("how", ["closed", "killed", "nonsense"])
def test_an_agent_whose_shell_ends_leaves_nothing(agent: Agent, bench: Bench, how: str) -> None:
    pid = _start(agent)
    if how == "closed":
        agent.stdin.close()
    elif how == "killed":
        agent.process.send_signal(signal.SIGKILL)
    else:
        agent.stdin.write(b"\xff" * 64)
        agent.stdin.flush()
    bench.wait_for(lambda: not _living(pid))
    agent.process.wait(10)
    bench.wait_for(lambda: not bench.marked(str(bench.folder)))


def test_what_an_agent_refuses(bench: Bench) -> None:
    for details, text in (
        ({"version": "0.0.0"}, f"Hora {VERSION} is installed there, and 0.0.0 here."),
        ({"directory": "/no/such"}, "The directory /no/such cannot be entered there: No such file"),
        ({"target": "other.py"}, "The script other.py does not exist."),
        ({"run": "/proc/none"}, "cannot be written"),
    ):
        agent = Agent(bench.folder)
        bench.script("")
        agent.begin(**details)
        assert text in agent.hear("refused")["what"]
        agent.stdin.close()
        agent.process.wait(10)
        agent.stdout.close()


# --- places and addresses -------------------------------------------------------------------------


def test_places() -> None:
    names = ("rank", "size", "local_rank", "local_size", "host_index", "host_count")
    assert [tuple(place[name] for name in names) for place in places_of("abacb")] == [
        (0, 5, 0, 2, 0, 3),
        (1, 5, 0, 2, 1, 3),
        (2, 5, 1, 2, 0, 3),
        (3, 5, 0, 1, 2, 3),
        (4, 5, 1, 2, 1, 3),
    ]


def test_addresses() -> None:
    lo, bridge = Address("lo", "127.0.0.1", 8), Address("docker0", "172.17.0.1", 16)
    a, b = Address("eth0", "10.0.0.1", 24), Address("eth1", "10.0.0.2", 24)
    fast_a, fast_b = Address("ib0", "10.9.0.1", 24), Address("ib0", "10.9.0.2", 24)
    routed = Address("eth0", "10.1.0.7", 24)
    both = {"a": [lo, bridge, a, fast_a], "b": [lo, bridge, fast_b, b]}
    assert choose(both) == {"a": a, "b": b}
    assert choose(both, "ib0") == {"a": fast_a, "b": fast_b}
    assert choose(both, "10.9.0.0/16") == {"a": fast_a, "b": fast_b}
    assert choose({"a": [lo, a], "b": [lo, routed]}) == {"a": a, "b": routed}
    assert choose({"a": [lo], "b": [b]}) == {"b": b}
    assert choose({"a": [lo], "b": [lo]}, "lo") == {"a": lo, "b": lo}
    assert lo in _network.addresses()


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_cut_network(tmp_path: Path) -> None:
    try:
        with two_hosts(tmp_path) as hosts:
            found = cut_once(tmp_path, hosts, slots=(1, 1), lasts=2.5, silence=1.0)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    assert not found.wrong, found.output
    assert found.next_step < 1.5 + 3
    assert found.ended < 1.5
    told = f"host {found.worlds[0]['hosts'][1]} is lost with worker 1: nothing was heard from it for 1.5 s"
    assert f"{told}; 1 worker goes on from commit" in found.output
    assert "is there again" in found.output
    assert socket.gethostname() not in found.worlds[0]["hosts"]


def test_names_that_are_none_are_passed_over() -> None:
    given = ("a", "a-1.b", "me@10.0.0.1", "-a", "me@-a", "a b", "a\0b", "", "a:b")
    assert [name for name in given if is_host(name)] == ["a", "a-1.b", "me@10.0.0.1"]


@pytest.mark.parametrize(
    ("commits", "leaving", "go"),
    [
        ((5, 5, 0), [0, 1], [1]),  # the third has nothing yet
        ((5, 5, 5), [0, 1], [0, 1]),
        ((5, 5), [0, 1], [1]),
        ((5,), [0], []),
        ((5, 3), [1], [1]),
        ((0, 0), [0, 1], [0, 1]),  # there is nothing to lose
        ((), [], []),
    ],
)
def test_the_last_who_has_the_state_stays(
    commits: tuple[int, ...], leaving: list[int], go: list[int]
) -> None:
    workers = [Worker(number=n, process=None, host="x", commits=made) for n, made in enumerate(commits)]  # type: ignore[arg-type]
    assert may_go(workers, leaving) == go

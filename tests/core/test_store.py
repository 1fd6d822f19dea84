"""The ranks' store: what is asked for arrives, waits end, and strangers do no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.core import _store_server, _store_wire, store
from hora.core.errors import UsageError, WorldError
from hora.core.store import Alone, RankGone, Store

SOURCE = str(Path(__file__).parents[2] / "src")

HEAD = """
import sys, time
from hora.core.store import Store
"""


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@contextlib.contextmanager
def stores(size: int, *, timeout: float = 10.0, token: bytes = b"") -> Iterator[list[Store]]:
    """The stores of all ranks, in this process."""
    with listener() as found, contextlib.ExitStack() as stack:
        port = found.getsockname()[1]
        first = Store.serve(found, size=size, timeout=timeout, token=token)
        stack.callback(first.close)
        made = [first]
        for rank in range(1, size):
            other = Store.connect("127.0.0.1", port, rank=rank, size=size, timeout=timeout, token=token)
            stack.callback(other.close)
            made.append(other)
        yield made


def port_of(one: Store) -> int:
    assert one._served is not None
    assert one._served._listener is not None
    port: int = one._served._listener.getsockname()[1]
    return port


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, or raises, called at the same time in threads."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except WorldError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@contextlib.contextmanager
def rank_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_exchange_whatever_they_have(size: int) -> None:
    with stores(size) as ranks:

        def rank(index: int) -> None:
            mine = ranks[index]
            for turn in range(20):  # the same key again and again; those who are ahead do not meet the next
                values = mine.exchange("turn", b"%d of %d" % (turn, index), index=index, count=size)
                assert values == [b"%d of %d" % (turn, other) for other in range(size)]
            large = mine.exchange("large", bytes([index]) * 10**7, index=index, count=size)
            assert [(len(one), one[:1], one[-1:]) for one in large] == [
                (10**7, bytes([other]), bytes([other])) for other in range(size)
            ]
            assert mine.exchange("empty", b"", index=index, count=size) == [b""] * size
            if index == size - 1:
                mine.set("left", b"first")
                mine.set("left", b"\0\xff" * 5)
            mine.exchange("set", b"", index=index, count=size)
            assert mine.get("left") == b"\0\xff" * 5
            if size == 4 and index in (1, 3):
                place = [1, 3].index(index)
                pair = mine.exchange("pair", b"%d" % index, index=place, count=2, members=[1, 3])
                assert pair == [b"1", b"3"]

        assert together([lambda index=index: rank(index) for index in range(size)]) == [None] * size


@settings(max_examples=30, deadline=None)
@given(
    key=st.text(max_size=200),
    values=st.lists(st.binary(max_size=70_000), min_size=3, max_size=3),
)
def test_keys_and_values_are_any_bytes(key: str, values: list[bytes]) -> None:
    with stores(3) as ranks:
        found = together(
            [
                lambda place=place: ranks[place].exchange(key, values[place], index=place, count=3)
                for place in range(3)
            ]
        )
        assert found == [values] * 3
        ranks[1].set(key, values[1])
        assert ranks[2].get(key) == values[1]


def test_a_value_is_waited_for_in_several_threads() -> None:
    with stores(2) as ranks:
        waiting = [
            lambda: ranks[0].get("later"),
            lambda: ranks[1].get("later"),
            lambda: ranks[1].get("later"),
        ]
        assert together([*waiting, lambda: ranks[0].set("later", b"x")]) == [b"x", b"x", b"x", None]


@pytest.mark.alone
def test_who_does_not_come_is_named_to_all_and_the_key_is_free_again() -> None:
    with stores(4) as ranks:
        began = time.monotonic()
        first, second = together(
            [
                lambda: ranks[0].exchange("x", b"", index=0, count=4, timeout=0.2),
                lambda: ranks[2].exchange("x", b"", index=2, count=4, timeout=9),
            ]
        )
        assert time.monotonic() - began < 2
        for error in (first, second):
            assert "Ranks 1, 3 did not come to 'x' within 0.2 s" in str(error)
            assert not isinstance(error, RankGone)
        with pytest.raises(WorldError, match=r"No rank has left 'y' .* within 0.1 s"):
            ranks[1].get("y", timeout=0.1)
        ok = together([lambda i=i: ranks[i].exchange("x", b"%d" % i, index=i, count=4) for i in range(4)])
        assert ok == [[b"0", b"1", b"2", b"3"]] * 4


def test_contradictions_are_told_to_all_who_are_in_them() -> None:
    with stores(3) as ranks:
        found = together(
            [
                lambda: ranks[0].exchange("x", b"", index=0, count=2, members=[0, 1]),
                lambda: ranks[1].exchange("x", b"", index=0, count=2, members=[1, 2]),
            ]
        )
        assert all("exchanges among" in str(error) for error in found), found
        found = together(
            [
                lambda: ranks[1].exchange("x", b"", index=1, count=3),
                lambda: ranks[1].exchange("x", b"", index=1, count=3),
            ]
        )
        assert all("Rank 1 came twice" in str(error) for error in found), found
        with pytest.raises(WorldError, match="Rank 2 is not number 0"):
            ranks[2].exchange("x", b"", index=0, count=3)
        with pytest.raises(UsageError, match="MiB"):
            ranks[2].set("x" * 2000, b"")
        assert (
            together([lambda i=i: ranks[i].exchange("x", b"", index=i, count=3) for i in range(3)])
            == [[b""] * 3] * 3
        )


@pytest.mark.alone
def test_the_end_of_a_rank_is_heard_of_at_once() -> None:
    code = """
mine = Store.connect("127.0.0.1", int(sys.argv[1]), rank=1, size=3, timeout=30)
print("here", flush=True)
mine.get("never")
"""
    with stores(2) as _, listener() as found:
        port = found.getsockname()[1]
        first = Store.serve(found, size=3, timeout=30)
        with rank_process(code, port) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "here\n"
            last = Store.connect("127.0.0.1", port, rank=2, size=3, timeout=30)
            threading.Timer(0.3, child.kill).start()
            began = time.monotonic()
            errors = together(
                [
                    lambda: first.exchange("x", b"", index=0, count=3),
                    lambda: last.exchange("x", b"", index=2, count=3),
                ]
            )
            assert time.monotonic() - began < 3
            assert all("Rank 1 ended before 'x'" in str(error) for error in errors), errors
            assert all(isinstance(error, RankGone) for error in errors)
        with pytest.raises(RankGone, match="Rank 1 ended"):  # and later, too
            last.exchange("y", b"", index=2, count=3)
        assert (
            together(  # what it does not take part in goes on
                [
                    lambda: first.exchange("z", b"0", index=0, count=2, members=[0, 2]),
                    lambda: last.exchange("z", b"2", index=1, count=2, members=[0, 2]),
                ]
            )
            == [[b"0", b"2"]] * 2
        )
        last.close()
        first.close()


SERVES = """
import socket
mine = Store.serve(socket.create_server(("127.0.0.1", 0)), size=2, timeout=30)
print(mine._served._listener.getsockname()[1], flush=True)
mine.get("never")
"""


@pytest.mark.alone
def test_the_end_of_rank_0_is_heard_of_at_once() -> None:
    with rank_process(SERVES) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        mine = Store.connect("127.0.0.1", port, rank=1, size=2, timeout=30)
        threading.Timer(0.2, child.kill).start()
        began = time.monotonic()
        with pytest.raises(RankGone, match="Rank 0, which keeps"):
            mine.exchange("x", b"", index=1, count=2)
        with pytest.raises(RankGone, match=r"Nobody listens at|Rank 0, which keeps"):
            mine.get("x")
        with pytest.raises(WorldError, match="Nobody listens at"):
            Store.connect("127.0.0.1", port, rank=1, size=2, timeout=0.3)
        assert time.monotonic() - began < 5
        mine.close()


def test_a_stopped_rank_0_is_given_up_some_seconds_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "GRACE", 0.3)
    with rank_process(SERVES) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        mine = Store.connect("127.0.0.1", port, rank=1, size=2, timeout=30)
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WorldError, match="does not answer"):
            mine.get("x", timeout=0.2)
        mine.close()


def raw(port: int, *parts: bytes) -> bytes:
    """Send bytes; what comes back until the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        with contextlib.suppress(OSError):  # it is closed after the first wrong byte
            for part in parts:
                link.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := link.recv(1 << 16):
                received += data
        return received


def test_strangers_are_sent_away_and_told_of(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_store_server, "GREETING_PATIENCE", 0.2)
    with stores(3, token=b"secret") as ranks:
        port = port_of(ranks[0])
        hello = _store_wire.HELLO
        client = b"12345678"
        token = _store_wire.padded(b"secret")
        ok = _store_wire.REPLY.pack(_store_wire.OK, 0)
        assert raw(port, b"GET / HTTP/1.1\r\n\r\n") == b""
        assert raw(port, b"hora-store-1\nbut then") == b""
        assert raw(port) == b""  # says nothing
        for what, refusal in {
            hello.pack(_store_wire.MAGIC, 1, 3, client, _store_wire.padded(b"wrong")): b"Another job",
            hello.pack(_store_wire.MAGIC, 1, 4, client, token): b"says that there are 4 ranks",
            hello.pack(_store_wire.MAGIC, 7, 3, client, token): b"no rank 7",
            hello.pack(_store_wire.MAGIC, 1, 3, client, token): b"Two workers say that they are rank 1",
        }.items():
            assert refusal in raw(port, what)
        told = capfd.readouterr().err
        assert told.count("\n") == 3, told
        assert "it sent b'GET / HTTP/1.1" in told
        assert "it said nothing for" in told
        ranks[2].close()  # now one who says that it is rank 2, and asks for what nobody may
        mine = hello.pack(_store_wire.MAGIC, 2, 3, client, token)
        huge = _store_wire.REQUEST.pack(_store_wire.SET, 1, 1.0, 0, 0, 1 << 60)
        assert raw(port, mine, huge) == ok
        unknown = _store_wire.REQUEST.pack(77, 1, 1.0, 0, 0, 1)
        assert raw(port, mine, unknown) == ok
        many = _store_wire.REQUEST.pack(_store_wire.SWAP, 1, 1.0, 0, 1 << 31, 1)
        assert raw(port, mine, many) == ok
        told = capfd.readouterr().err
        assert told.count("as rank 2") == 2, told
        assert "Others like it are not told of" in told  # a scanner opens thousands
        again = Store.connect("127.0.0.1", port, rank=2, size=3, timeout=5, token=b"secret")
        everyone = [*ranks[:2], again]
        assert (
            together([lambda i=i: everyone[i].exchange("x", b"%d" % i, index=i, count=3) for i in range(3)])
            == [[b"0", b"1", b"2"]] * 3
        )
        again.close()
        with pytest.raises(WorldError, match=r"does not take this worker in: Another job listens there"):
            Store.connect("127.0.0.1", port, rank=2, size=3, timeout=5, token=b"other")


def test_waits_end_when_they_are_aborted() -> None:
    with stores(2) as ranks:
        threading.Timer(0.2, ranks[1].abort, ["The guard stops the job."]).start()
        began = time.monotonic()
        with pytest.raises(WorldError, match="The guard stops the job"):
            ranks[1].get("never")
        assert time.monotonic() - began < 5
        with pytest.raises(WorldError, match="The guard stops the job"):
            ranks[1].set("x", b"")


def test_a_forked_child_neither_uses_it_nor_keeps_the_rank_alive() -> None:
    code = """
import os
mine = Store.connect("127.0.0.1", int(sys.argv[1]), rank=1, size=2, timeout=30)
child = os.fork()
if not child:
    try:
        mine.set("x", b"")
    except Exception as error:
        os.write(1, error.what.encode() + b"\\n")  # whole, whatever the parent writes
    time.sleep(30)
os.write(1, b"%d\\n" % child)
time.sleep(30)
"""
    with listener() as found:
        port = found.getsockname()[1]
        first = Store.serve(found, size=2, timeout=20)
        with rank_process(code, port) as rank:
            assert rank.stdout is not None
            lines = sorted([rank.stdout.readline(), rank.stdout.readline()])
            assert "forked child" in lines[1], lines
            child = int(lines[0])
            try:
                rank.kill()
                with pytest.raises(RankGone, match="Rank 1 ended"):
                    first.exchange("x", b"", index=0, count=2)
            finally:
                os.kill(child, signal.SIGKILL)
        first.close()


def test_answers_leave_before_rank_0_ends() -> None:
    code = """
import socket
mine = Store.serve(socket.create_server(("127.0.0.1", 0)), size=2, timeout=30)
print(mine._served._listener.getsockname()[1], flush=True)
mine.exchange("x", b"0" * 10**7, index=0, count=2)
mine.close()
"""
    with rank_process(code) as child:
        assert child.stdout is not None
        mine = Store.connect("127.0.0.1", int(child.stdout.readline()), rank=1, size=2, timeout=30)
        assert list(map(len, mine.exchange("x", b"", index=1, count=2))) == [10**7, 0]
        mine.close()


def test_one_worker_needs_nobody() -> None:
    alone = Alone(timeout=0.1)
    alone.set("x", b"1")
    assert alone.get("x") == b"1"
    assert alone.exchange("y", b"2", index=0, count=1) == [b"2"]
    with pytest.raises(WorldError, match="within 0.1 s"):
        alone.get("z")

"""Two hosts on one: network namespaces that a pair of virtual cables joins, and a remote shell over those."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Hosts", "NoNamespacesError", "two_hosts"]

SERVER = """
import json, socket, subprocess, sys
listening = socket.create_server((sys.argv[1], 7300))
print("listening", flush=True)
while True:
    connection, _ = listening.accept()
    with connection:
        text = b""
        while not text.endswith(b"\\n"):
            text += connection.recv(1)
        command = json.loads(text)
        subprocess.Popen(command, stdin=connection, stdout=connection, start_new_session=True)
"""

CLIENT = """
import json, os, select, socket, sys
connection = socket.create_connection((sys.argv[1], 7300), timeout=5)
connection.settimeout(None)
connection.sendall(json.dumps(sys.argv[2:]).encode() + b"\\n")
while True:
    for ready in select.select([0, connection], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else connection.recv(65536)
        if not data:
            sys.exit()
        if ready == 0:
            connection.sendall(data)
        while ready != 0 and data:
            data = data[os.write(1, data):]
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class NoNamespacesError(Exception):
    """This system, or this user, cannot make network namespaces."""


class Hosts:
    """Two hosts, ``here`` and ``there``, and a remote shell from the first to the second.

    Attributes:
        here: words that run a command on the first.
        there: the address of the second, which is also its name.
        shell: for ``--remote-shell``.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.names = names
        self.addresses = ["10.73.1.1", "10.73.1.2"]
        self.there = self.addresses[1]
        self.here = ["ip", "netns", "exec", names[0]]
        for name, text in (("server.py", SERVER), ("client.py", CLIENT)):
            (folder / name).write_text(text)
        self.shell = f"{sys.executable} {folder / 'client.py'} {{host}}"
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None

    def serve(self) -> None:
        """Accept commands on the second host, as sshd does."""
        words = [sys.executable, str(self._folder / "server.py"), self.there]
        self._server = subprocess.Popen(
            ["ip", "netns", "exec", self.names[1], *words],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "listening\n"

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "hora1", "down")

    def heal(self) -> None:
        ip("-n", self.names[1], "link", "set", "hora1", "up")

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            assert self._server.stdout is not None
            self._server.stdout.close()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two of them.

    Args:
        folder: for the programs of the remote shell.

    Raises:
        NoNamespacesError: the system gives none.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNamespacesError("network namespaces need root and the command ip (Debian: iproute2)")
    names = [f"horahosts{os.getpid()}{letter}" for letter in "ab"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(
                f"this system gives no network namespaces: {error.stderr.strip()}"
            ) from error
        hosts = Hosts(folder, names)
        one, other = (("hora1", "netns", name) for name in names)
        ip("link", "add", *one, "type", "veth", "peer", "name", *other)
        for name, address in zip(names, hosts.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "hora1")
            ip("-n", name, "link", "set", "hora1", "up")
        hosts.serve()
        try:
            yield hosts
        finally:
            hosts.close()
    finally:
        for name in made:
            ip("netns", "delete", name)

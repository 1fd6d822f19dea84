"""Where a disturbed job runs: with a small disk and a network of its own, where the disturbances need them.

Both are namespaces of the kernel, so that the disk that is filled is never the user's, and the network that
is cut is never anybody else's.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hora.chaos import _inside
from hora.core.errors import ChaosError

__all__ = ["Stage"]

BALLAST = "hora-chaos-ballast"
BLOCK = 1 << 20


class Stage:
    """Starts one job, and holds on to its disk and its network.

    Args:
        run: the run directory of the job, an empty directory.
        disk: bytes of the small disk that is put there; 0: none.
        net: whether the job gets a network of its own, which has loopback alone.

    Attributes:
        process: the launcher.
        folder: the run directory, as it can be seen from here.
        output: what the job prints.
    """

    process: subprocess.Popen[bytes]
    output: Path

    def __init__(self, run: Path, *, disk: int = 0, net: bool = False) -> None:
        self._run, self._disk, self._net = run, disk, net
        self._descriptor: int | None = None
        self._ports: set[int] = set()
        self.folder = run

    def start(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        """Start the job.

        Args:
            command: of the launcher.
            environ: its environment.
            output: file that gets what it prints.

        Raises:
            ChaosError: the namespaces cannot be made here.
        """
        self.output = output
        unshare = self._unshare() if self._disk or self._net else []
        reader, writer = os.pipe()
        disk = str(self._run) if self._disk else ""
        told = [str(os.getpid()), str(writer), disk, str(self._disk), "1" if self._net else "0"]
        words = [*unshare, sys.executable, "-I", "-S", _inside.__file__, *told, "--", *command]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            if not ready.read(1):
                self.process.wait()
                raise _impossible(output.read_text(errors="replace").strip())
        if self._disk:
            # Held open, it outlives the namespace, whose end would take it away with all that is on it.
            path = f"/proc/{self.process.pid}/root{self._run}"
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            self.folder = Path(f"/proc/self/fd/{self._descriptor}")

    def fill(self) -> int:
        """Fill the small disk; the bytes that it took."""
        assert self._disk, "asked for at the start"
        took, block = 0, bytes(BLOCK)
        with (self.folder / BALLAST).open("ab", buffering=0) as file:
            while block:
                try:
                    took += file.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block = block[: len(block) // 2]
        return took

    def empty(self) -> None:
        """Take away what :meth:`fill` has put there."""
        (self.folder / BALLAST).unlink(missing_ok=True)

    def cut(self, ports: set[int]) -> None:
        """Drop every packet of these TCP ports, in both directions."""
        new = ports - self._ports
        self._ports |= new
        self._rules("add", new)

    def heal(self) -> None:
        """Let all packets pass again."""
        self._rules("del", self._ports)
        self._ports = set()

    def close(self) -> None:
        """The job has ended: bring what is on the small disk to where it belongs."""
        if self._descriptor is None:
            return
        self.empty()
        shutil.copytree(self.folder, self._run, symlinks=True, dirs_exist_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        self.folder = self._run

    def _rules(self, what: str, ports: set[int]) -> None:
        if not ports:
            return
        rule = "rule {} pref 10 ipproto tcp {} {} blackhole\n"
        rules = "".join(
            rule.format(what, side, port) for port in sorted(ports) for side in ("sport", "dport")
        )
        enter = ["nsenter", f"--target={self.process.pid}", "--net"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        for family in ("-4", "-6"):
            done = subprocess.run(
                [*enter, "ip", family, "-batch", "-"],
                input=rules,
                text=True,
                check=False,
                capture_output=True,
            )
            if done.returncode and self.process.poll() is None:  # else the network has gone with the job
                raise _impossible(done.stderr.strip())

    def _unshare(self) -> list[str]:
        needed = ["unshare", *(["mount"] if self._disk else []), *(["ip", "nsenter"] if self._net else [])]
        missing = [name for name in needed if shutil.which(name) is None]
        if missing:
            raise _impossible(f"there is no {', '.join(missing)}")
        words = ["unshare", "--mount"]
        if os.geteuid() != 0:
            words += ["--user", "--map-root-user"]
        return words + (["--net"] if self._net else [])


def _impossible(why: str) -> ChaosError:
    return ChaosError(
        f"The job cannot have a disk or a network of its own here: {why or 'unshare has failed'}.",
        fix="Leave out --fill-disk and --disconnect, or be root on Linux with util-linux and iproute2.",
    )

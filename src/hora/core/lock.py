"""A directory that one run at a time may write to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hora.core.errors import CheckpointError
from hora.core.rundir import disk_errors

__all__ = ["DirectoryLock"]

_held: dict[Path, DirectoryLock] = {}


class DirectoryLock:
    """Held from :meth:`take` until :meth:`release`, or until the process ends in whatever way.

    It is a record lock of the kernel (``fcntl``): one that is gone with the process cannot be left behind,
    child processes do not inherit it, and it works between the hosts of a network file system too. A
    process that takes it twice holds it once.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def take(cls, directory: Path, about: dict[str, Any]) -> DirectoryLock:
        """Take the directory; it is made where it does not exist.

        Args:
            directory: of checkpoints.
            about: who takes it, for the message to others: ``run``, ``job``.

        Raises:
            CheckpointError: another run holds it.
            RunDirectoryError: it cannot be written.
        """
        path = directory.absolute() / "lock"
        held = _held.get(path)
        if held is not None and held._pid == os.getpid():
            return held
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = _holder(descriptor)
                os.close(descriptor)
                raise CheckpointError(
                    f"Checkpoints in {directory} are written by another run: {holder}.",
                    fix="Wait for its end or stop it, or give this run a directory of its own: hora run "
                    "--checkpoints DIR. To go on from there without writing there: hora run --resume DIR.",
                ) from None
            except OSError:
                os.close(descriptor)
                raise
            who = {**about, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
            # A full disk leaves the lock without a name, which is no reason to stop.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, (json.dumps(who, default=str) + "\n").encode(), 0)
        _held[path] = cls(path, descriptor)
        return _held[path]

    def release(self) -> None:
        """Let others have the directory."""
        if _held.get(self._path) is self and self._pid == os.getpid():
            del _held[self._path]
            os.close(self._descriptor)


def _holder(descriptor: int) -> str:
    try:
        who = json.loads(os.pread(descriptor, 65536, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since"]))
        run = f"run {who['run']}, " if who.get("run") else ""
        return f"{run}process {who['pid']} on {who['host']}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it has not left its name"

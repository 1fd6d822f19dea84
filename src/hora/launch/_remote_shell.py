"""The remote shell: the command that starts an agent on another host."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hora.core.errors import SettingError
from hora.core.settings import Settings

__all__ = ["check", "command", "is_host"]

QUOTING = ("ssh", "rsh")
"""Programs that hand the words to a shell of the host, which takes them apart once more."""

HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name or an address, perhaps with a user. One that begins with ``-`` would be an option of ssh."""


def is_host(name: str) -> bool:
    """Whether this can be the name of a host."""
    return HOST.fullmatch(name) is not None


def check(shell: str) -> None:
    """Find out whether the program is there; that of the default may be missing until it is needed.

    Raises:
        SettingError: it is not, or the setting names none.
    """
    words = _words(shell, "host")
    if shell != Settings.remote_shell and (not words or shutil.which(words[0]) is None):
        raise SettingError(
            f"HORA_REMOTE_SHELL={shell!r}: there is no program {words[0] if words else ''!r}, "
            "so nothing can be started on other hosts.",
            fix="Install it (Debian: openssh-client), or write another: --remote-shell 'ssh -p 2222 {host}'.",
        )


def command(shell: str, host: str) -> list[str]:
    """What starts the agent on a host: the same Python, at the same place."""
    # -W, -X and the like hold for the workers there too, as multiprocessing does it.
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    agent = [sys.executable, *flags, str(Path(__file__).with_name("_agent_start.py"))]
    words = _words(shell, host)
    if Path(words[0]).name in QUOTING:
        agent = [shlex.quote(word) for word in agent]
    return [*words, *agent]


def _words(shell: str, host: str) -> list[str]:
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise SettingError(
            f"HORA_REMOTE_SHELL={shell!r} is no command: {error}.", fix="Write 'ssh -p 2222 {host}'."
        ) from error
    if "{host}" in shell:
        return [word.replace("{host}", host) for word in words]
    return [*words, host] if words else []

"""Where the other ranks reach this one: a free port for the engine's server."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from hora.core.errors import WorldError

__all__ = ["free_address"]

LOWEST = 20000
"""Ports from here to the first that the kernel hands out by itself: nobody gets one of these by chance
between the moment that it is found free and the one in which TensorFlow's server is there, which takes no
open socket."""

TRIES = 200


def free_address(*, one_host: bool) -> str:
    """``host:port`` of a port that is free.

    Args:
        one_host: whether all ranks are on this host.

    Raises:
        WorldError: none was found.
    """
    host = "127.0.0.1" if one_host else socket.gethostname()
    highest = _first_ephemeral() - 1
    choose = random.SystemRandom()
    for _ in range(TRIES):
        port = choose.randint(LOWEST, highest) if highest > LOWEST else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return f"{host}:{probe.getsockname()[1]}"
    raise WorldError(
        f"No free port was found between {LOWEST} and {highest} for TensorFlow's server.",
        fix="Look what listens there: ss -ltnp.",
    )


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return 32768

"""The flags of elastic jobs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hora.cli._command import seconds, workers
from hora.core.errors import LaunchError

if TYPE_CHECKING:
    from hora.launch.job import Elastic

__all__ = ["hosts_of", "hosts_variables", "how_many"]


def how_many(arguments: argparse.Namespace, given: str | None) -> tuple[int, Elastic | None]:
    """The number of workers to begin with, and how it may change.

    Args:
        arguments: with ``min_workers``, ``max_workers``, ``hosts_from``, ``elastic_timeout``, ``reset_limit``
            and ``cooldown``.
        given: the number of workers that the user asks for.

    Raises:
        LaunchError: flags that contradict each other.
    """
    from hora.launch.job import Elastic

    if not any(getattr(arguments, name) for name in ("min_workers", "max_workers", "hosts_from")):
        for name in ("elastic_timeout", "reset_limit", "cooldown"):
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise LaunchError(
                    f"{flag} is about elastic jobs, and this is none.", fix="Write --min-workers 1 too."
                )
        return workers(given or "1"), None
    least = _number("--min-workers", arguments.min_workers, 1)
    wanted = None if given is None else workers(given)
    most = _number("--max-workers", arguments.max_workers, wanted or least)
    count = most if wanted is None else wanted
    if not 1 <= least <= count <= most:
        raise LaunchError(
            f"--min-workers {least}, -n {count} and --max-workers {most} are not in ascending order.",
            fix=f"Write --min-workers 1 -n {max(count, 1)} --max-workers {max(count, most, 1)}.",
        )
    timeout = seconds("--elastic-timeout", arguments.elastic_timeout)
    shortest, longest = (seconds("--cooldown", text) or 0.0 for text in arguments.cooldown or ("1", "60"))
    if not 0 < shortest <= longest:
        raise LaunchError(
            f"--cooldown {shortest:g} {longest:g}: that is no shortest and longest time.",
            fix="Write for example --cooldown 1 60.",
        )
    if timeout is not None and not timeout > 0:
        raise LaunchError(
            f"--elastic-timeout {timeout:g} is not a positive number of seconds.", fix="Write 600."
        )
    return count, Elastic(
        least=least,
        most=most,
        timeout=600.0 if timeout is None else timeout,
        resets=None if arguments.reset_limit is None else _number("--reset-limit", arguments.reset_limit, 0),
        cooldown=(shortest, longest),
        hosts_from=arguments.hosts_from,
    )


def hosts_of(text: str, given: str | None, *, flag: str = "--hosts") -> list[tuple[str, int]]:
    """How many workers each host has.

    Args:
        text: ``name:slots,name:slots``; without slots a host has one.
        given: the number of workers that the user asks for; None: as many as there are slots.
        flag: what gave the text.

    Raises:
        LaunchError: a text of another form, or fewer slots than workers.
    """
    import socket

    from hora.launch._remote_shell import is_host
    from hora.launch.job import HERE

    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, slots = part.partition(":")
        if not is_host(name) or (slots and not slots.isdecimal()):
            raise LaunchError(
                f"{flag} {text}: {part!r} is not of the form host:slots.", fix=f"Write {flag} a:2,b:2."
            )
        name = HERE if name in (HERE, "127.0.0.1", socket.gethostname()) else name
        found[name] = found.get(name, 0) + int(slots or 1)
    total = sum(found.values())
    if total == 0:
        raise LaunchError(f"{flag} {text} has no slots, so no worker.", fix=f"Write {flag} a:2,b:2.")
    wanted = total if given is None else workers(given)
    if not 1 <= wanted <= total:
        raise LaunchError(
            f"-n {wanted} workers do not fit in the {total} slots of {flag} {text}.",
            fix=f"Write -n {total}, or leave -n out.",
        )
    spread: list[tuple[str, int]] = []
    for name, most in found.items():
        count = min(most, wanted - sum(count for _, count in spread))
        if count:
            spread.append((name, count))
    return spread


def hosts_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings about other hosts that flags give.

    Raises:
        LaunchError: they are given for a job on this host.
    """
    found = {}
    for name in ("remote_shell", "network"):
        value = getattr(arguments, name)
        if value is not None:
            if not arguments.hosts_from and not arguments.hosts:
                flag = "--" + name.replace("_", "-")
                raise LaunchError(
                    f"{flag} is about other hosts, and this job has none.", fix="Write --hosts a:2,b:2 too."
                )
            found[f"HORA_{name.upper()}"] = value
    return found


def _number(flag: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal():
        raise LaunchError(f"{flag} {text}: that is not a whole number.", fix=f"Write {flag} 1.")
    return int(text)

"""Which address of each host the workers of a job use between hosts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hora.core.errors import SettingError

__all__ = ["Address", "addresses", "check", "choose"]


class Address(NamedTuple):
    """One address of a host.

    Attributes:
        interface: the network interface that has it.
        address: it, IPv4.
        prefix: how many bits name the network.
    """

    interface: str
    address: str
    prefix: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The network that it belongs to."""
        return ipaddress.IPv4Network(f"{self.address}/{self.prefix}", strict=False)


def addresses() -> list[Address]:
    """Those of this host, in the system's order."""
    import psutil

    found = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and name in up:
                address = ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
                found.append(Address(name, str(address.ip), address.network.prefixlen))
    return found


def check(wanted: str) -> None:
    """Find out whether the setting can name a network.

    Raises:
        SettingError: it looks like one, and is none.
    """
    if "/" in wanted:
        try:
            ipaddress.IPv4Network(wanted, strict=False)
        except ValueError as error:
            raise SettingError(
                f"HORA_NETWORK={wanted!r} is no network: {error}.",
                fix="Write one such as 10.0.0.0/24, or the name of a network interface: eth0.",
            ) from error


def choose(hosts: Mapping[str, Sequence[Address]], wanted: str | None = None) -> dict[str, Address]:
    """An address for each host, at which the others can reach it; a host that has none is left out.

    One network that all hosts share is taken, the first in the first host's order. Where none is shared,
    they are taken to be routed, and each host's first address counts.

    Args:
        hosts: each host's addresses.
        wanted: a network such as ``10.0.0.0/24``, or the name of an interface; None: any.
    """
    fitting = {host: [each for each in found if _fits(each, wanted)] for host, found in hosts.items()}
    able = {host: found for host, found in fitting.items() if found}
    for first in next(iter(able.values()), []):
        shared = {}
        for host, found in able.items():
            inside = next((each for each in found if each.network == first.network), None)
            if inside is not None:
                shared[host] = inside
        # The bridges of containers have the same address on every host, and join none.
        if len({each.address for each in shared.values()}) == len(able):
            return shared
    return {host: found[0] for host, found in able.items()}


def _fits(address: Address, wanted: str | None) -> bool:
    number = ipaddress.IPv4Address(address.address)
    if wanted is None:
        return not number.is_loopback and not number.is_link_local  # those no other host can reach
    if "/" in wanted:
        return number in ipaddress.IPv4Network(wanted, strict=False)
    return address.interface == wanted

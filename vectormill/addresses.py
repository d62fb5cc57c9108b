"""Addresses: which of them only this machine can reach. Opens no socket and asks no name server."""

import ipaddress
from typing import Final

LOOPBACK_NAME: Final = "localhost"


def is_loopback_host(host: str) -> bool:
    """Return whether a server or client that uses this address stays on this machine."""
    address = parse_address(host)
    return address.is_loopback if address is not None else host.lower().rstrip(".") == LOOPBACK_NAME


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that is written here, with or without the brackets of a URL; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None

"""Parse host addresses and URLs of databases. Opens no socket and resolves no names."""

import ipaddress
import re
from typing import Final

LOOPBACK_NAME: Final = "localhost"


def is_loopback_host(host: str) -> bool:
    """Return whether a host is a loopback address or name, reachable only from this machine."""
    address = parse_address(host)
    return address.is_loopback if address is not None else host.lower().rstrip(".") == LOOPBACK_NAME


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, with or without the brackets of a URL; None for a host name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def to_libpq(database_url: str) -> str:
    """Return a URL of SQLAlchemy, as VECTORMILL_DATABASE_URL is one, in the form that libpq reads."""
    return re.sub(r"^postgres(ql)?(\+psycopg)?://", "postgresql://", database_url)

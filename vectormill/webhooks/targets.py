"""Targets: the rules for addresses to which webhooks may be sent. Opens no socket and resolves no name.

A webhook makes the server connect to a URL of the client's choice (SSRF). Addresses that are not public are
refused unless a setting allows them, and the metadata services of clouds always.
"""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from vectormill.addresses import is_loopback_host, parse_address
from vectormill.domain.errors import InvalidOption
from vectormill.webhooks.webhook import MAX_URL_CHARS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

SETTING: Final = "VECTORMILL_WEBHOOK_PRIVATE_TARGETS"
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# The metadata services of clouds besides 169.254.0.0/16: EC2 over IPv6, Azure, Alibaba, Oracle.
METADATA: Final = frozenset(
    ipaddress.ip_address(each)
    for each in ("fd00:ec2::254", "168.63.129.16", "100.100.100.200", "192.0.0.192")
)


def refuse_address(written: str, *, allows_private: bool) -> str | None:
    """Return why nothing may be sent to this address; None if it is allowed.

    Any text that is not an address is refused.
    """
    address = parse_address(written.partition("%")[0])
    if address is None:
        return f"{written} is not an IP address."
    address = find_inner(address)
    if address in METADATA or address.is_link_local:
        return f"{written} is a cloud metadata address, which may reveal secrets; it is never contacted."
    if address.is_multicast or address.is_unspecified:
        return f"{written} is not the address of a single machine."
    if address.is_global or allows_private:
        return None
    return f"{written} is not a public address. Set {SETTING}=true to allow private addresses."


def find_inner(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds (NAT64, 6to4, …), or else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (address,))[-1]


def check_url(url: str, *, allows_private: bool) -> str:
    """Return the URL if it may be the target of a webhook. Raise InvalidOption.

    A host name is not resolved here, but whenever a message is sent.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidOption(f"The URL has more than {MAX_URL_CHARS:,} characters.")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError as error:
        raise InvalidOption(f"{url!r} is not a URL: {error}.") from error
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidOption(
            f"{url!r} contains characters that are not allowed in a URL; percent-encode them."
        )
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidOption(f"{url!r} must start with https:// or http:// and name a host.")
    if parts.username is not None or parts.password is not None:
        raise InvalidOption(
            "A webhook's URL must not contain a user or password: its receiver verifies the signature instead."
        )
    if parts.fragment:
        raise InvalidOption(f"{url!r} has a fragment (#…), which would not be sent; remove it.")
    reason = refuse_address(host, allows_private=allows_private) if parse_address(host) else None
    if reason is None and is_loopback_host(host) and not allows_private:
        reason = f"{host} is this server itself. Set {SETTING}=true to allow it."
    if reason is not None:
        raise InvalidOption(reason)
    return url

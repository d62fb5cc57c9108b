"""Host checks: requests that another site's page makes a browser send are refused.

A page may let its own name resolve to this machine (DNS rebinding); its requests then have that name in Host.
Or it may send a form across sites (CSRF); such a request has the page's Origin. A page can forge neither
header. Programs other than browsers can, but need a key.
"""

from dataclasses import dataclass
from ipaddress import ip_network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from api.door.scopes import SAFE_METHODS, find_scope
from api.problems import Problem
from vectormill.addresses import is_loopback_host, parse_address
from vectormill.domain.errors import ConfigurationError

EVERY_HOST = "*"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The host names under which clients may address this API.

    If the API listens on every address, requests may name any IP address: an attacker's page can make its own
    name resolve to this machine, but cannot be served from one of its addresses.
    """

    bound: str
    names: frozenset[str]

    def allow(self, host: str) -> bool:
        if EVERY_HOST in self.names or is_loopback_host(host) or host in self.names or host == self.bound:
            return True
        bound = parse_address(self.bound)
        return parse_address(host) is not None and bound is not None and bound.is_unspecified


def parse_allowed_hosts(bound: str, setting: str) -> AllowedHosts:
    """Parse VECTORMILL_ALLOWED_HOSTS, which is a list of names separated by commas.

    `bound` is the address on which the API listens.
    """
    names = (name.strip().lower().rstrip(".") for name in setting.split(","))
    return AllowedHosts(bound.lower(), frozenset(name for name in names if name))


def parse_trusted_proxies(setting: str) -> list[str] | None:
    """Parse VECTORMILL_TRUSTED_PROXIES, a list of addresses and networks separated by commas.

    Return None, uvicorn's default, if it is empty. Raise ConfigurationError.
    """
    if not setting.strip():
        return None
    proxies = [proxy.strip() for proxy in setting.split(",")]
    for proxy in proxies:
        try:
            ip_network(proxy)
        except ValueError as error:
            raise ConfigurationError(
                f"Invalid entry {proxy!r} in VECTORMILL_TRUSTED_PROXIES: expected addresses or networks "
                "separated by commas, such as 10.0.0.7 or 10.1.0.0/16."
            ) from error
    return proxies


def find_host_problem(allowed: AllowedHosts, scope: Scope) -> Problem | None:
    """Return the Problem of a request with a foreign Host or Origin; None if both are allowed.

    Health probes may use any name, since they reveal nothing.
    """
    if find_scope(scope["method"], scope["path"]) is None:
        return None
    headers = Headers(scope=scope)
    host = name_of(f"//{headers.get('host', '')}")
    if not allowed.allow(host):
        return Problem(
            421,
            "unknown-host",
            f"Host name {host!r} is not allowed. If it is a name of this API, set "
            "VECTORMILL_ALLOWED_HOSTS to it.",
        )
    origin = headers.get("origin")
    if origin is None or scope["method"] in SAFE_METHODS or allowed.allow(name_of(origin)):
        return None
    return Problem(
        403,
        "foreign-page",
        f"Pages of {origin} may not change anything here. If it is your site, set "
        "VECTORMILL_ALLOWED_HOSTS to its host.",
    )


def name_of(url: str) -> str:
    """Return the host in a URL, without its port; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # such as an unclosed bracket
        return ""

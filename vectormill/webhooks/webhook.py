"""Webhooks: their events, where they may lead, the states of their deliveries, and the schedule of retries.

Signatures, headers and pauses follow Standard Webhooks, https://www.standardwebhooks.com.

A webhook makes the server connect to a URL of the client's choice (SSRF). Addresses that are not public are refused
unless a setting allows them, and the metadata services of clouds always. Nothing here opens a socket or resolves a
name.
"""

import base64
import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from urllib.parse import urlsplit
from uuid import UUID

from vectormill.addresses import is_loopback_host, parse_address
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.job import TERMINAL_JOB_STATES
from vectormill.runs.run import HELD, TERMINAL_RUN_STATES

JOB_EVENTS: Final = tuple(f"job.{state}" for state in TERMINAL_JOB_STATES)
# A held run waits for a person's decision, so this person is notified.
RUN_EVENTS: Final = tuple(f"run.{state}" for state in (*TERMINAL_RUN_STATES, HELD))
EVENTS: Final = (*JOB_EVENTS, *RUN_EVENTS)
# Sent on request, and to any webhook.
TEST_EVENT: Final = "webhook.test"

PENDING: Final = "pending"
DELIVERED: Final = "delivered"
FAILED: Final = "failed"
DeliveryState = Literal["pending", "delivered", "failed"]
DELIVERY_STATES: Final[tuple[DeliveryState, ...]] = (PENDING, DELIVERED, FAILED)

MAX_WEBHOOKS: Final = 100
MAX_URL_CHARS: Final = 2048
MAX_DESCRIPTION_CHARS: Final = 500

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - a prefix, not a secret
SECRET_BYTES: Final = 32
# How long the former secret still signs messages, while receivers switch to the new one.
ROTATION_SECONDS: Final = 86_400.0
LONGEST_ROTATION_SECONDS: Final = 30 * 86_400.0

# The pauses after each failed attempt. The attempt after the last pause, three days later, is the final one.
RETRY_SECONDS: Final = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
MAX_ATTEMPTS: Final = len(RETRY_SECONDS) + 1
# Pauses vary by this share at random, so that deliveries that failed together are not retried together.
JITTER: Final = 0.1
LONGEST_RETRY_AFTER_SECONDS: Final = 86_400.0
# A webhook that has failed for this long without a success is disabled.
FAILING_SECONDS: Final = 5 * 86_400.0
# Longer than any pause between attempts: after this long without a failure, the next one starts a new series.
SILENT_SECONDS: Final = 2 * 86_400.0

GONE: Final = 410


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook as it was in the database at one moment, without its secrets."""

    id: int
    url: str
    description: str
    events: Sequence[str]
    is_enabled: bool
    disabled_reason: str | None
    failing_since: datetime | None
    former_secret_until: datetime | None
    num_delivered: int
    num_refused: int
    num_failed: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for one webhook and the state of its delivery.

    `due_at` is None once the delivery has ended.
    """

    id: int
    webhook_id: int
    event_id: UUID
    event_type: str
    payload: str
    state: DeliveryState
    num_attempts: int
    status_code: int | None
    error: str | None
    due_at: datetime | None
    attempted_at: datetime | None
    ended_at: datetime | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Posting:
    """The message, URL and secrets for one attempt at a delivery. The newest secret comes first."""

    webhook_id: int
    message_id: str
    payload: str
    url: str
    secrets: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A receiver's reply to an attempt: a status code, or an error if no reply came.

    `retry_after` is in seconds.
    """

    status_code: int | None
    error: str | None = None
    retry_after: float | None = None

    @property
    def is_success(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


def make_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def name_message(event_id: UUID) -> str:
    """Return the `webhook-id` header for an event; it is the same at every attempt."""
    return f"msg_{event_id.hex}"


def check_events(events: Iterable[str]) -> tuple[str, ...]:
    """Return these events in the order of EVENTS; all events if none is named. Raise InvalidOption."""
    wanted = set(events)
    if unknown := sorted(wanted - set(EVENTS)):
        raise InvalidOption(f"Unknown event {unknown[0]!r}; expected one of: {', '.join(EVENTS)}.")
    return tuple(event for event in EVENTS if event in wanted or not wanted)


def pause_after(num_attempts: int, reply: Reply, chance: float) -> float | None:
    """Return the seconds between failed attempt `num_attempts` and the next; None if that was the last.

    `chance`, from 0 to 1, is the position within the jitter. The reply may ask for a longer pause
    (Retry-After).
    """
    if reply.status_code == GONE or num_attempts >= MAX_ATTEMPTS:
        return None
    pause = RETRY_SECONDS[num_attempts - 1] * (1 - JITTER + 2 * JITTER * chance)
    return max(pause, min(reply.retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS))


def describe_disabling(reply: Reply) -> str:
    """Return the reason why a webhook was disabled, as a sentence for its owner."""
    if reply.status_code == GONE:
        return "The receiver answered 410 Gone: it wants no more messages."
    days = FAILING_SECONDS / 86_400
    return f"Every attempt failed for {days:g} days; the last error was: {describe_failure(reply)}"


def describe_failure(reply: Reply) -> str | None:
    """Return the reason why an attempt failed; None if it succeeded."""
    if reply.is_success:
        return None
    if reply.status_code is None:
        return reply.error or "No answer."
    if 300 <= reply.status_code < 400:
        return f"The receiver answered {reply.status_code}, a redirect, which is not followed: set the target's URL."
    return f"The receiver answered {reply.status_code}."


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

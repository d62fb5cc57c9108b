"""API keys: their secrets, names, scopes and lifetimes. Independent of HTTP and Postgres."""

import hashlib
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from vectormill.domain.errors import InvalidOption

READ: Final = "read"
WRITE: Final = "write"
SOURCES: Final = "sources"
WEBHOOKS: Final = "webhooks"
ADMIN: Final = "admin"
# The scopes that each scope includes. Sources and webhooks do not include each other: the first makes the
# server read what it can reach, the second makes it post to a URL of the client's choice.
OPENS: Final = {
    READ: frozenset({READ}),
    WRITE: frozenset({READ, WRITE}),
    SOURCES: frozenset({READ, WRITE, SOURCES}),
    WEBHOOKS: frozenset({READ, WRITE, WEBHOOKS}),
    ADMIN: frozenset({READ, WRITE, SOURCES, WEBHOOKS, ADMIN}),
}
SCOPES: Final = tuple(OPENS)

# Recognizable, so that secret scanners find leaked keys in logs and repositories.
SECRET_PREFIX: Final = "vmk_"  # noqa: S105 - a prefix, not a secret
SECRET_BYTES: Final = 32
# 256 bits are 43 letters of base64url, or 64 hex digits.
SECRET: Final = re.compile(rf"{SECRET_PREFIX}[A-Za-z0-9_-]{{43,128}}")
# The command of a shell that makes a secret.
MAKE_SECRET: Final = f'echo "{SECRET_PREFIX}$(openssl rand -hex 32)"'
VALID: Final = "valid"
KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LIFETIME: Final = re.compile(r"([1-9][0-9]{0,4})([hdw])")
UNITS: Final = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. Its secret was shown once and is not kept. `last_used_at` is accurate to the hour."""

    name: str
    scope: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    def describe_state(self, now: datetime) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else VALID


def make_secret(random: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Make a secret of 256 random bits."""
    return SECRET_PREFIX + urlsafe_b64encode(random(SECRET_BYTES)).decode().rstrip("=")


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 hash of a secret. One round is enough: 256 random bits cannot be guessed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def includes(scope: str, needed: str) -> bool:
    """Return True if a key of scope `scope` may do what needs scope `needed`.

    An unknown scope, as of a later release, includes nothing.
    """
    return needed in OPENS.get(scope, ())


def check_secret(secret: str) -> str:
    """Return a secret that a person chose.

    Raise InvalidOption if it is malformed or too short to have 256 random bits.
    """
    if not SECRET.fullmatch(secret):
        raise InvalidOption(
            f"A key must be {SECRET_PREFIX} followed by 43 to 128 random letters, digits, - and _. To create one: "
            f"`{MAKE_SECRET}`."
        )
    return secret


def check_key_name(name: str) -> str:
    """Return the name. Raise InvalidOption if it is not a valid name of a key."""
    if not KEY_NAME.fullmatch(name):
        raise InvalidOption(
            f"Invalid key name {name!r}: expected at most 64 letters, digits, '.', '_' and '-', the first a letter or "
            "digit."
        )
    return name


def parse_lifetime(text: str | None) -> timedelta | None:
    """Return the duration of a lifetime such as `90d`, `12h` or `2w`; None for None. Raise InvalidOption."""
    if text is None:
        return None
    match = LIFETIME.fullmatch(text)
    if match is None:
        raise InvalidOption(
            f"Invalid lifetime {text!r}: expected a number and a unit, such as 12h, 90d or 2w."
        )
    return int(match[1]) * UNITS[match[2]]

"""What a key is made of, and how the API knows the keys: read once for all who come together."""

import re
from datetime import timedelta
from typing import Any

import anyio
import pytest
from sqlalchemy.exc import OperationalError

from vectormill.domain.errors import InvalidOption
from vectormill.keys.api_key import (
    SCOPES,
    check_key_name,
    check_secret,
    hash_secret,
    includes,
    make_secret,
    parse_lifetime,
)
from vectormill.keys.api_keys import FRESH_SECONDS, PATIENCE_SECONDS, CachedKey, Keyring, find_key

KEY = CachedKey(1, "me", hash_secret("vmk_secret"), "read", is_expired=False, is_use_due=False)


def test_a_secret_has_256_bits_and_its_sha_256_is_kept() -> None:
    asked: list[int] = []

    def random(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return b"\xff" * num_bytes

    assert re.fullmatch(r"vmk__{43}|vmk_[\w-]{43}", make_secret(random))
    assert asked == [32]
    assert make_secret() != make_secret()
    assert check_secret(make_secret())
    assert hash_secret("abc").hex().startswith("ba7816bf8f01cfea")
    assert len(hash_secret("\udcff")) == 32


def test_sources_and_webhooks_include_write_and_not_each_other() -> None:
    opened = {scope: [needed for needed in SCOPES if includes(scope, needed)] for scope in (*SCOPES, "later")}
    assert opened == {
        "read": ["read"],
        "write": ["read", "write"],
        "sources": ["read", "write", "sources"],
        "webhooks": ["read", "write", "webhooks"],
        "admin": ["read", "write", "sources", "webhooks", "admin"],
        "later": [],
    }


def test_what_a_person_writes_of_a_key_is_checked_in_sentences() -> None:
    for secret in ("", "password", "vmk_short", "vmk_" + "x" * 42, "vmk_" + "x" * 50 + "\n"):
        with pytest.raises(InvalidOption, match="openssl rand -hex 32"):
            check_secret(secret)
    hours = {text: parse_lifetime(text) for text in ("12h", "90d", "2w", None)}
    assert hours == {
        "12h": timedelta(hours=12), "90d": timedelta(days=90), "2w": timedelta(weeks=2), None: None,
    }  # fmt: skip
    for lifetime in ("", "90", "d", "-1d", "0d", "1.5d", "90 d", "999999d"):
        with pytest.raises(InvalidOption, match="12h, 90d or 2w"):
            parse_lifetime(lifetime)
    assert check_key_name("ci.nightly-2") == "ci.nightly-2"
    for name in ("", "-x", "a b", "a" * 65, "näme", "a\n"):
        with pytest.raises(InvalidOption, match="Invalid key name"):
            check_key_name(name)


def test_a_key_is_found_by_its_secret_until_it_expires() -> None:
    other = CachedKey(2, "other", hash_secret("vmk_other"), "admin", is_expired=False, is_use_due=True)
    expired = CachedKey(1, "me", KEY.hash, "read", is_expired=True, is_use_due=False)
    assert find_key([other, KEY], "vmk_secret") == KEY
    assert find_key([other, expired], "vmk_secret") is None
    assert find_key([other, KEY], "vmk_nobody") is None


class CountingKeyring(Keyring):
    """Reads from memory; `is_away` is a Postgres that does not answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0
        self.is_away = False
        engine: Any = None
        super().__init__(engine, 100, clock=lambda: self.now)

    def _load(self) -> list[CachedKey]:
        self.num_reads += 1
        if self.is_away:
            raise OperationalError("SELECT", {}, Exception("away"))
        return [KEY]

    def ask_together(self, times: int = 20) -> int:
        """Return how many of so many requests were told the keys."""
        told = []

        async def ask() -> None:
            try:
                told.append(await self.keys())
            except OperationalError:
                return

        async def ask_all() -> None:
            async with anyio.create_task_group() as group:
                for _ in range(times):
                    group.start_soon(ask)

        anyio.run(ask_all)
        return len(told)


def test_requests_that_come_together_read_once_and_while_postgres_is_away_once_a_second() -> None:
    ring = CountingKeyring()
    assert (ring.ask_together(), ring.num_reads) == (20, 1)
    ring.now += FRESH_SECONDS
    assert (ring.ask_together(), ring.num_reads) == (20, 2)
    ring.is_away = True
    ring.now += FRESH_SECONDS
    assert (ring.ask_together(), ring.num_reads) == (0, 3)
    assert ring.last_known == [KEY]
    ring.is_away = False
    assert ring.ask_together() == 0
    ring.now += PATIENCE_SECONDS
    assert ring.ask_together() == 20

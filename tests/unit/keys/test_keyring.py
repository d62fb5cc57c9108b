"""The keys are read once for all who come together, and a Postgres that is away is not asked by each of them."""

from typing import Any

import anyio
import pytest
from sqlalchemy.exc import OperationalError

from vectormill.keys.api_key import hash_secret
from vectormill.keys.api_keys import KeptKey
from vectormill.keys.keyring import FRESH_SECONDS, PATIENCE_SECONDS, Keyring, find_key

KEY = KeptKey(1, "me", hash_secret("vmk_secret"), "read", is_expired=False, is_use_due=False)


class CountingKeyring(Keyring):
    """Reads from memory; `is_away` is a Postgres that does not answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0
        self.is_away = False
        engine: Any = None
        super().__init__(engine, 100, clock=lambda: self.now)

    def _load(self) -> list[KeptKey]:
        self.num_reads += 1
        if self.is_away:
            raise OperationalError("SELECT", {}, Exception("away"))
        return [KEY]


async def ask_together(ring: Keyring, times: int = 20) -> int:
    """How many of so many requests were told the keys."""
    told = []

    async def ask() -> None:
        try:
            told.append(await ring.keys())
        except OperationalError:
            return

    async with anyio.create_task_group() as group:
        for _ in range(times):
            group.start_soon(ask)
    return len(told)


def test_requests_that_come_together_read_once_and_later_ones_again() -> None:
    ring = CountingKeyring()
    assert anyio.run(ask_together, ring) == 20
    assert ring.num_reads == 1
    ring.now += FRESH_SECONDS
    assert anyio.run(ask_together, ring) == 20
    assert ring.num_reads == 2


def test_a_postgres_that_is_away_is_asked_once_a_second_and_stale_keys_open_nothing() -> None:
    ring = CountingKeyring()
    anyio.run(ask_together, ring)
    ring.is_away = True
    ring.now += FRESH_SECONDS
    assert anyio.run(ask_together, ring) == 0
    assert ring.num_reads == 2
    assert ring.last_known == [KEY]
    ring.is_away = False
    assert anyio.run(ask_together, ring) == 0
    ring.now += PATIENCE_SECONDS
    assert anyio.run(ask_together, ring) == 20


@pytest.mark.parametrize("is_expired", [True, False])
def test_a_key_is_found_by_its_secret_until_it_expires(is_expired: bool) -> None:
    keys = [
        KeptKey(2, "other", hash_secret("vmk_other"), "admin", is_expired=False, is_use_due=True),
        KeptKey(1, "me", hash_secret("vmk_secret"), "read", is_expired=is_expired, is_use_due=False),
    ]
    assert find_key(keys, "vmk_secret") == (None if is_expired else KEY)
    assert find_key(keys, "vmk_nobody") is None

"""What a key is made of, and what its name, its scope and its lifetime may be."""

import re
from datetime import timedelta

import pytest

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


def test_a_secret_has_256_bits_and_can_be_told_from_other_words() -> None:
    asked: list[int] = []

    def random(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return b"\xff" * num_bytes

    assert re.fullmatch(r"vmk__{43}|vmk_[\w-]{43}", make_secret(random))
    assert asked == [32]
    assert make_secret() != make_secret()
    assert check_secret(make_secret())


def test_what_is_kept_of_a_secret_is_its_sha_256() -> None:
    assert hash_secret("abc").hex().startswith("ba7816bf8f01cfea")
    assert len(hash_secret("\udcff")) == 32


def test_sources_and_webhooks_include_write_and_not_each_other() -> None:
    opened = {scope: [needed for needed in SCOPES if includes(scope, needed)] for scope in SCOPES}
    assert opened == {
        "read": ["read"],
        "write": ["read", "write"],
        "sources": ["read", "write", "sources"],
        "webhooks": ["read", "write", "webhooks"],
        "admin": ["read", "write", "sources", "webhooks", "admin"],
    }


def test_a_scope_of_a_later_release_opens_nothing() -> None:
    assert not any(includes("later", needed) for needed in SCOPES)


@pytest.mark.parametrize("secret", ["", "password", "vmk_short", "vmk_" + "x" * 42, "vmk_" + "x" * 50 + "\n"])
def test_a_secret_of_a_person_that_is_too_short_is_refused_with_how_to_make_one(secret: str) -> None:
    with pytest.raises(InvalidOption, match="openssl rand -hex 32"):
        check_secret(secret)


@pytest.mark.parametrize(("text", "hours"), [("12h", 12), ("90d", 90 * 24), ("2w", 14 * 24)])
def test_a_lifetime_is_written_short(text: str, hours: int) -> None:
    assert parse_lifetime(text) == timedelta(hours=hours)
    assert parse_lifetime(None) is None


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "0d", "1.5d", "90 d", "999999d"])
def test_a_lifetime_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="12h, 90d or 2w"):
        parse_lifetime(text)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a" * 65, "näme", "a\n"])
def test_a_name_that_could_not_be_typed_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="cannot name a key"):
        check_key_name(name)
    assert check_key_name("ci.nightly-2") == "ci.nightly-2"

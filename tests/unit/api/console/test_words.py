"""Numbers and times as the console tells them."""

from datetime import UTC, datetime, timedelta

import pytest

from api.console import words

NOW = datetime(2026, 11, 23, 7, 15, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.25, "0.2 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90_061, "1 d 1 h"),
    ],
)
def test_a_duration_has_two_units_at_the_most(seconds: float | None, told: str) -> None:
    assert words.tell_duration(seconds) == told


@pytest.mark.parametrize(
    ("share", "told"),
    [(None, "–"), (0, "0 %"), (0.004, "0.4 %"), (0.42, "42 %"), (0.9999, "99 %"), (1, "100 %")],
)
def test_a_hundred_percent_are_all_and_a_little_is_not_nothing(share: float | None, told: str) -> None:
    assert words.tell_share(share) == told


@pytest.mark.parametrize(
    ("ago", "told"),
    [(0, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7300, "2 h ago"), (90_000, "1 d ago")],
)
def test_how_long_ago_it_was_is_one_unit(ago: int, told: str) -> None:
    assert words.tell_ago(NOW - timedelta(seconds=ago), NOW) == told


def test_counts_rates_moments_and_queries_are_told() -> None:
    assert words.tell_count(12345) == "12,345"
    assert (words.tell_rate(0), words.tell_rate(0.254), words.tell_rate(1234.5)) == ("–", "0.25", "1,234")
    assert words.tell_moment(NOW) == "2026-11-23 07:15:02 UTC"
    assert words.tell_about(3721) == "4,000"
    assert words.tell_query({"state": "failed", "after": None}) == "state=failed"


def test_a_command_in_a_sentence_is_set_as_one_and_nothing_in_it_is_markup() -> None:
    assert words.tell_sentence("run `a <b>` & go") == "run <code>a &lt;b&gt;</code> &amp; go"
    assert words.tell_sentence("<script>") == "&lt;script&gt;"

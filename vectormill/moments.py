"""Format points in time for clients and people."""

from datetime import UTC, datetime
from typing import Annotated, overload

from msgspec import Meta

from vectormill.domain.errors import InvalidOption

# A point in time in an answer of the API, as RFC 3339 text.
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


def in_utc(moment: datetime | None) -> datetime | None:
    """Return the moment in UTC; None stays None."""
    return moment.astimezone(UTC) if moment else None


def parse_moment(option: str, written: str) -> datetime:
    """Parse an ISO 8601 date, or date and time, in UTC unless it names another zone.

    Raise InvalidOption, which names the option.
    """
    try:
        moment = datetime.fromisoformat(written)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidOption(f"{option} expects an ISO 8601 moment such as 2026-11-23T08:00.") from error


def describe_moment(moment: datetime) -> str:
    """Format a UTC time to the minute, for a sentence."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


@overload
def format_moment(moment: datetime) -> Moment: ...
@overload
def format_moment(moment: None) -> None: ...
@overload
def format_moment(moment: datetime | None) -> Moment | None: ...
def format_moment(moment: datetime | None) -> Moment | None:
    """Format a time in UTC as RFC 3339, as in answers of the API; None stays None."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")

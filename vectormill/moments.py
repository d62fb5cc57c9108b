"""Points in time as clients and people read them."""

from datetime import UTC, datetime
from typing import Annotated, overload

from msgspec import Meta

# A point in time in an answer.
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


def in_utc(moment: datetime | None) -> datetime | None:
    """Return the moment in UTC; None stays None."""
    return moment.astimezone(UTC) if moment else None


def describe_moment(moment: datetime) -> str:
    """Return a moment of UTC to the minute, for a sentence."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


@overload
def tell_moment(moment: datetime) -> Moment: ...
@overload
def tell_moment(moment: None) -> None: ...
@overload
def tell_moment(moment: datetime | None) -> Moment | None: ...
def tell_moment(moment: datetime | None) -> Moment | None:
    """Return the moment in UTC as answers have it (RFC 3339); None stays None."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")

"""Points in time as clients and people read them."""

from datetime import UTC, datetime


def in_utc(moment: datetime | None) -> datetime | None:
    """Return the moment in UTC; None stays None."""
    return moment.astimezone(UTC) if moment else None


def describe_moment(moment: datetime) -> str:
    """Return a moment of UTC to the minute, for a sentence."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")

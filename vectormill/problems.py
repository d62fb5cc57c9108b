"""Errors that the client raises for refusals and failures of the API. Sends no requests."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from vectormill.domain.errors import Unavailable, VectormillError


class ApiError(VectormillError):
    """The API refused the request.

    `status` is the HTTP status; `title`, `detail` and `errors` are those of the problem details (RFC 9457).
    `retry_after` is the number of seconds to wait before a retry, if the API named it.
    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str | None = None,
        errors: Iterable[Any] = (),
        retry_after: float | None = None,
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)
        # The detail of our API names the places already; a proxy in between may send anything.
        places = " ".join(map(_describe_place, self.errors))
        super().__init__(detail or f"The API refused the request: {title} (HTTP {status}). {places}".strip())


class ApiFailure(ApiError, Unavailable):
    """The API failed to handle the request; trying again later may help."""


class ApiUnreachable(Unavailable):
    """The API cannot be reached."""


class WaitTimeout(Unavailable):
    """The job did not finish in time; it is still running."""


def read_problem(
    status: int, reason: str, body: bytes, *, headers: Mapping[str, str] | None = None, now: datetime
) -> ApiError:
    """Build the error for an answer other than 2xx, with or without problem details (RFC 9457)."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    kind = ApiFailure if status >= 500 else ApiError
    detail, errors = problem.get("detail"), problem.get("errors")
    return kind(
        status,
        str(problem.get("title") or reason or "Error"),
        detail if isinstance(detail, str) else None,
        errors if isinstance(errors, list) else (),
        read_retry_after(headers or {}, now),
    )


def read_retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds to wait by the Retry-After header; None if it is absent or invalid.

    The header has seconds or a date (RFC 9110, 10.2.3).
    """
    written = headers.get("Retry-After", "").strip()
    if not written:
        return None
    if written.isdecimal():
        return float(written)
    try:
        moment = parsedate_to_datetime(written)
    except ValueError:
        return None
    if moment.tzinfo is None:  # the zone "-0000" means unknown and is read as UTC
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def _describe_place(error: Any) -> str:
    """Format an entry of a problem's `errors`: the place of the error and its message."""
    if not isinstance(error, Mapping):
        return f"[{error}]"
    places = ("line", "pointer", "field", "loc", "parameter")
    place = next((f"{name} {error[name]}" for name in places if name in error), None)
    message = next((error[name] for name in ("detail", "message", "msg") if name in error), None)
    return f"[{': '.join(str(part) for part in (place, message) if part is not None) or json.dumps(error)}]"

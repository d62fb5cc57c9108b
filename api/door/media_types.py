"""Media types: checks of the Content-Type of a request's body.

A form on another site's page cannot send the type of JSON, so the check also protects against CSRF.
"""

from typing import Final

from fastapi import Request

from api.problems import Problem

JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"


def read_media_type(request: Request) -> str:
    """Return the media type of the body, without parameters; empty if the request names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_json(request: Request) -> None:
    """Raise Problem if the Content-Type is not that of JSON."""
    media_type = read_media_type(request)
    if media_type != JSON_TYPE:
        raise unsupported_media_type(media_type, JSON_TYPE)


def unsupported_media_type(media_type: str, *wanted: str) -> Problem:
    given = f"is {media_type}" if media_type else "is missing"
    return Problem(
        415,
        "unsupported-media-type",
        f"The Content-Type must be {' or '.join(wanted)}; it {given}.",
        headers={"Accept": ", ".join(wanted)},
    )

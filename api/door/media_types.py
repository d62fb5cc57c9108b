"""Media types: a body says what it is, in a header that no form of another site's page can send."""

from typing import Final

from fastapi import Request

from api.problems import Problem

JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"


def read_media_type(request: Request) -> str:
    """Return the media type of the body without parameters; empty when the request names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_json(request: Request) -> None:
    """Raise Problem for a body that does not say it is JSON."""
    media_type = read_media_type(request)
    if media_type != JSON_TYPE:
        raise unsupported_media_type(media_type, JSON_TYPE)


def unsupported_media_type(media_type: str, *wanted: str) -> Problem:
    given = f"as {media_type}" if media_type else "without a Content-Type"
    return Problem(
        415,
        "unsupported-media-type",
        f"This request is sent as {' or '.join(wanted)}, and came {given}.",
        headers={"Accept": ", ".join(wanted)},
    )

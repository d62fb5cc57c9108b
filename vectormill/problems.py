"""Problems: what the API's refusals and silences become in Python. Knows nothing of how requests are made."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vectormill.domain.errors import Unavailable, VectormillError


class ApiError(VectormillError):
    """The API refused the request.

    `status` is the HTTP status; `title`, `detail` and `errors` are those of the problem details (RFC 9457).
    """

    def __init__(
        self, status: int, title: str, detail: str | None = None, errors: Iterable[Any] = ()
    ) -> None:
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)
        # Our own API's detail names the places already; what stands between us and it may send anything.
        places = " ".join(map(_describe_place, self.errors))
        super().__init__(detail or f"The API refused the request: {title} (HTTP {status}). {places}".strip())


class ApiFailure(ApiError, Unavailable):
    """The API answered with a failure of its own; trying again later may help."""


class ApiUnreachable(Unavailable):
    """The API cannot be reached."""


class WaitTimeout(Unavailable):
    """The job did not end in time; it goes on."""


def read_problem(status: int, reason: str, body: bytes) -> ApiError:
    """The error that an answer other than 2xx tells of, whether or not it carries problem details."""
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
    )


def _describe_place(error: Any) -> str:
    """One entry of a problem's `errors` in words: the place, and what is wrong there."""
    if not isinstance(error, Mapping):
        return f"[{error}]"
    places = ("line", "pointer", "field", "loc", "parameter")
    place = next((f"{name} {error[name]}" for name in places if name in error), None)
    message = next((error[name] for name in ("detail", "message", "msg") if name in error), None)
    return f"[{': '.join(str(part) for part in (place, message) if part is not None) or json.dumps(error)}]"
